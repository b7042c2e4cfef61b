"""Memberships of a job that survives losses: who takes a lost rank's place, and which reports come too late."""

from dlrover.master.machine import inputs
from dlrover.master.machine.membership import Membership
from dlrover.rpc.messages import Join
from dlrover.spec import events
from dlrover.spec.check import CheckReport, Component, ProbeResult
from dlrover.spec.membership import JoinMembers
from dlrover.spec.node import NodeStatus
from dlrover.spec.world import Offer
from tests.support.drivers import JobDriver

SPEED = ProbeResult(component=Component.DEVICE, figure=100.0, unit="GFLOP/s")
TIME = ProbeResult(component=Component.NETWORK, figure=1.0, unit="ms")


def membership(job: JobDriver) -> Membership:
    return job.machine.state.membership


def test_a_node_that_waits_beyond_a_full_world_takes_a_lost_nodes_place():
    job = JobDriver.running(2, 2, 2, survive=True)
    job.connect(2)
    job.join(2)
    assert job.machine.spares.standing == {2}
    job.give(inputs.NodeSilent(1, 60.0))
    assert job.machine.rendezvous.members == (0, 2)
    assert job.machine.spares.standing == set()
    assert job.emitted(events.SpareTakesPlace) == [events.SpareTakesPlace(2, 1)]
    assert membership(job).ranks == {0: range(2), 2: range(2, 4)}


def test_a_spare_that_takes_a_place_owes_no_answer_to_its_check():
    job = JobDriver(2, 2, managed_nodes=2, spares=1, survive=True, node_check=True)
    for node in range(3):
        job.give(inputs.NodePlaced(node, f"process {node}"))
        job.connect(node, claims=node)
    job.join(0, 1)
    while (run := job.machine.checks.run) is not None:
        report = CheckReport(check=run.number, round=run.round, results=(SPEED, TIME))
        job.give(*(inputs.Reported(node, report) for node in run.orders))
    job.join(2)
    assert job.machine.checks.run is not None
    job.give(inputs.NodeExited(1, "its pod was deleted"))
    assert job.machine.rendezvous.members == (0, 2)
    job.give(inputs.DeadlinePassed(), at=1000.0)
    assert job.machine.rendezvous.members == (0, 2)
    assert job.status(2) is NodeStatus.RUNNING


def test_a_rank_of_a_lost_node_that_asks_too_late_does_not_join():
    job = JobDriver.launched(3, 3, survive=True)
    job.give(inputs.NodeExited(2, "its pod was deleted"))
    job.give(inputs.MemberReported(JoinMembers(1, rank=4, attempt=0)))
    assert membership(job).attempts.keys() == {0, 1, 2, 3}
    job.give(inputs.NodePlaced(3, "process 3"))
    job.connect(3, claims=3)
    job.join(3)
    assert membership(job).ranks[3] == range(4, 6)
    job.give(inputs.MemberReported(JoinMembers(1, rank=4, attempt=1)))
    assert membership(job).attempts[4] == 1


def test_only_a_node_with_as_many_workers_takes_a_lost_ones_place():
    job = JobDriver.running(2, 1, 2, survive=True)
    job.give(inputs.NodeSilent(0, 60.0))
    for node, nproc in ((2, 1), (3, 3), (4, 2)):
        job.connect(node)
        round_ = job.machine.rendezvous.next_round
        job.give(inputs.Reported(node, Join(round_, Offer(nproc, f"host{node}", 29400))))
    assert membership(job).ranks == {1: range(2, 4), 4: range(2)}
