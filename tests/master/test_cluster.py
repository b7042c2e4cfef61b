"""The tasks of a framework's own cluster, as the master lists them."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.errors import ProtocolError
from dlrover.master.journal.history import History
from dlrover.master.journal.journal import open_journal
from dlrover.master.machine.cluster import TaskCluster
from dlrover.master.service import Master
from dlrover.spec.job import JobSpec
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.cluster import (
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


def given(*requests: ClusterRequest) -> tuple[TaskCluster, ClusterReply]:
    cluster, reply = TaskCluster(), ClusterReply()
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


@contextlib.contextmanager
def master_at(directory: Path) -> Iterator[Master]:
    journal = open_journal("file:", directory / "journal")
    history = History(directory / "events")
    with contextlib.closing(journal), contextlib.closing(history):
        master = Master(journal, history)
        job = JobSpec(
            name="job", min_nodes=3, max_nodes=3, managed_nodes=3, other_nodes=1, chief=True, servers=2,
            min_servers=2, max_servers=2, server_failover="instance",
        )  # fmt: skip
        master.begin(job, str(directory), None)
        yield master


def test_the_next_master_knows_the_tasks_and_the_wanted_numbers(tmp_path: Path) -> None:
    async def asked(*requests: ClusterRequest) -> list[object]:
        with master_at(tmp_path) as master:
            return [await master.requests.use(request) for request in requests]

    asyncio.run(asked(EnterCluster(AGAIN), EnterCluster(PS[1]), UseCluster((AGAIN,))))
    refused, found = asyncio.run(asked(EnterCluster(PS[0]), LookCluster()))
    assert isinstance(refused, Unanswered)
    assert isinstance(found, ClusterReply)
    assert found.tasks == (AGAIN, PS[1])
    assert found.wanted == {"chief": 1, "worker": 2, "ps": 2}
    (left,) = asyncio.run(asked(LeaveCluster(AGAIN)))
    assert isinstance(left, ClusterReply)
    assert left.leaving == (AGAIN,), "it is in use"
