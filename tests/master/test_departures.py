"""Nodes whose agents shut down while something else is under way."""

import pytest

from dlrover.master.machine import inputs
from dlrover.master.machine.waiting import waiting_for
from dlrover.rpc.messages import Dismiss, Leaving, StopRequest
from dlrover.spec import events
from dlrover.spec.check import CheckReport, Component, ProbeResult
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import Limits
from dlrover.spec.node import LaunchNode, NodeStatus
from tests.support.drivers import JobDriver

ECHO = {
    "kind": FailureKind.EXCEPTION,
    "exception": "RuntimeError",
    "message": "Connection closed by peer",
}
BROKEN = {
    "kind": FailureKind.EXCEPTION,
    "exception": "torch.AcceleratorError",
    "message": "CUDA error: uncorrectable ECC error encountered",
}
KILLED = {"kind": FailureKind.SIGNAL, "signal": 9}
NOTICE = Leaving("The agent was stopped by SIGTERM.")


def leave(job: JobDriver, node: int, at: float) -> list[inputs.Command]:
    return job.give(inputs.Reported(node, NOTICE), at=at)


def test_a_node_that_leaves_is_not_given_up_as_well() -> None:
    job = JobDriver.launched()
    job.fail(0, ECHO, at=20.0)
    leave(job, 1, at=20.1)
    commands = job.fail(1, BROKEN, at=20.2)
    assert not any(isinstance(c, inputs.KillNode) for c in commands), "it stores what is in memory"
    [excluded] = job.emitted(events.HostExcluded)
    assert excluded.hostname == "host1"
    commands = job.give(inputs.NodeExited(1, "its agent left"), at=30.0)
    assert [c for c in commands if isinstance(c, LaunchNode)] == [LaunchNode(3, 1, ("host1",))]
    assert job.status(1) is NodeStatus.LOST
    job.join(0, 2, at=31.0)
    job.give(inputs.DeadlinePassed(), at=1000.0)
    deadline = job.machine.deadline()
    assert deadline is None or deadline > 1000.0, "nothing of the node is due any more"


def answer(job: JobDriver) -> None:
    """Answer all orders of a check, except of nodes that leave: the nodes are sound."""
    network = ProbeResult(component=Component.NETWORK, figure=1.0, unit="ms")
    while (run := job.machine.checks.run) and run.missing - job.machine.rendezvous.leaving:
        node = min(run.missing - job.machine.rendezvous.leaving)
        report = CheckReport(check=run.number, round=run.round, results=(network,))
        job.give(inputs.Reported(node, report))


def test_a_node_that_leaves_during_its_check_is_not_blamed_for_it() -> None:
    job = JobDriver(2, 3, node_check=True, limits=Limits(check_timeout=30.0))
    for node in range(3):
        job.connect(node)
    job.join(0, 1, 2, at=10.0)
    answer(job)
    job.fail(1, KILLED, at=20.0)
    job.join(0, 1, 2, at=21.0)
    assert job.machine.checks.run is not None
    leave(job, 1, at=22.0)
    answer(job)
    job.give(inputs.DeadlinePassed(), at=100.0)
    assert job.emitted(events.HostExcluded) == []
    job.give(inputs.NodeDisconnected(1), at=110.0)
    answer(job)
    assert job.machine.rendezvous.members == (0, 2)


def test_a_node_that_leaves_is_named_and_its_time_counts_as_shutdown() -> None:
    job = JobDriver.running(3)
    before = job.spent().get("shutdown", 0.0)
    leave(job, 1, at=20.0)
    job.join(0, 2, at=21.0)
    said = waiting_for(job.machine, 25.0)
    assert said.startswith("waiting for node 1 (is leaving): 5 s of "), said
    job.give(inputs.NodeDisconnected(1), at=30.0)
    assert job.spent()["shutdown"] - before == 10.0


@pytest.mark.parametrize("lost", [True, False])
def test_nodes_of_an_ended_job_learn_whether_others_are_lost(lost: bool) -> None:
    job = JobDriver.launched()
    if lost:
        job.give(inputs.NodeExited(1, "its machine is gone"), at=20.0)
    commands = job.give(StopRequest("enough", 5), at=21.0)
    dismissals = [c.message for c in commands if isinstance(c, inputs.Say)]
    assert dismissals == [Dismiss(job.machine.outcome, store=True, partial=lost)] * (3 - lost)
