"""The tasks of a framework's own cluster, as the master lists them."""

import pytest

from dlrover.errors import ProtocolError
from dlrover.master.machine.cluster import Cluster
from dlrover.spec.cluster import (
    ClusterReply,
    ClusterRequest,
    ClusterTask,
    EnterCluster,
    LeaveCluster,
    LookCluster,
    UseCluster,
)

PS = [ClusterTask("ps", i, 1, f"host:{i}") for i in range(3)]
AGAIN = ClusterTask("ps", 0, 2, "host:9")


def given(*requests: ClusterRequest) -> tuple[Cluster, ClusterReply]:
    cluster, reply = Cluster(), ClusterReply()
    for request in requests:
        reply = cluster.handle(request)
        cluster.validate()
    return cluster, reply


def test_a_later_start_takes_the_place_of_an_earlier_one() -> None:
    cluster, reply = given(EnterCluster(PS[0]), EnterCluster(PS[1]), EnterCluster(AGAIN))
    assert reply.tasks == (AGAIN, PS[1])
    with pytest.raises(ProtocolError, match="Task 0 of ps has start 2; start 1 is over"):
        cluster.handle(EnterCluster(PS[0]))
    assert cluster.handle(EnterCluster(AGAIN)) == cluster.handle(LookCluster()) == reply


def test_a_task_leaves_once_nobody_uses_it() -> None:
    entered = [EnterCluster(task) for task in PS]
    cluster, reply = given(*entered, UseCluster(tuple(PS[:2])), LeaveCluster(PS[2]))
    assert reply.tasks == tuple(PS[:2]), "nobody used it"
    reply = cluster.handle(LeaveCluster(PS[1]))
    assert (reply.tasks, reply.leaving) == (tuple(PS[:2]), (PS[1],))
    assert cluster.handle(UseCluster((PS[0],))).tasks == (PS[0],)
    assert cluster.handle(LeaveCluster(PS[1])).tasks == (PS[0],), "it asks again"


def test_a_start_that_is_over_leaves_nothing_behind() -> None:
    cluster, _ = given(EnterCluster(PS[0]), UseCluster((PS[0],)), LeaveCluster(PS[0]))
    reply = cluster.handle(EnterCluster(AGAIN))
    assert (reply.tasks, reply.leaving) == ((AGAIN,), ())
    assert cluster.handle(LeaveCluster(PS[0])).tasks == (AGAIN,)
