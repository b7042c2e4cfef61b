"""The job machine: the cheapest sufficient action, hosts that are kept out, and nodes that fail again and again."""

import msgspec
import pytest

from dlrover.errors import ExitCode
from dlrover.master.machine.diagnosis.diagnosis import RuleTable
from dlrover.master.machine.inputs import (
    Greet,
    KillNode,
    MasterStarted,
    NodeExited,
    Progressed,
    Say,
    Submitted,
)
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Phase
from dlrover.rpc.messages import CallToRound, Dismiss, Hello
from dlrover.spec import events
from dlrover.spec.failure import Action, Failure, FailureKind, Origin, Rule
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.node import LaunchNode, NodeStatus
from tests.support.drivers import JobDriver

BROKEN = {
    "kind": FailureKind.EXCEPTION,
    "exception": "torch.AcceleratorError",
    "message": "CUDA error: uncorrectable ECC error encountered",
}
KILLED = {"kind": FailureKind.SIGNAL, "signal": 9}
OUT_OF_MEMORY = KILLED | {"oom_killed": True}
CRASHED = {"kind": FailureKind.SIGNAL, "signal": 11}
BUG = {"kind": FailureKind.EXCEPTION, "exception": "ValueError"}
ECHO = {
    "kind": FailureKind.EXCEPTION,
    "exception": "RuntimeError",
    "message": "Connection closed by peer",
}


def kinds(commands):
    return [type(c.message if isinstance(c, Say) else c) for c in commands]


def actions(job):
    return [event.action for event in job.emitted(events.RestartDecided)]


def rejoin(job, *nodes, at=None):
    """The nodes stop their workers and join again; the next round trains."""
    commands = job.join(*nodes, at=at)
    assert job.machine.state.phase is Phase.RUNNING
    job.give(Progressed(job.machine.rendezvous.round, 5))
    return commands


# ---- the node elsewhere


def test_a_broken_device_has_its_node_launched_elsewhere():
    job = JobDriver.launched()
    commands = job.fail(1, BROKEN, at=100.0)
    assert commands == [
        KillNode(1),
        LaunchNode(3, 1, ("host1",)),
        *(Say(node, CallToRound(2, commands[-1].message.reason)) for node in (0, 2)),
    ]
    assert job.status(1) is NodeStatus.LOST
    assert job.machine.nodes[1].reason.startswith("rank 2 lost its device to a hardware error")
    [excluded] = job.emitted(events.HostExcluded)
    assert (excluded.hostname, excluded.seconds) == ("host1", 3600.0)
    assert actions(job) == [Action.RELAUNCH]
    job.connect(3, claims=3)
    assert {c.node_id for c in rejoin(job, 0, 2, 3)} == {0, 2, 3}


def test_where_there_is_one_host_it_is_not_kept_out():
    job = JobDriver.launched(one_host=True)
    commands = job.fail(1, BROKEN, at=100.0)
    assert commands[:2] == [KillNode(1), LaunchNode(3, 1)]
    assert job.emitted(events.HostExcluded) == []
    assert actions(job) == [Action.RELAUNCH]


def test_every_launch_avoids_the_host_until_its_time_has_passed():
    job = JobDriver.launched()
    job.fail(1, BROKEN, at=100.0)
    job.connect(3, claims=3)
    rejoin(job, 0, 2, 3)
    [launch] = [
        c for c in job.give(NodeExited(0, "it ended"), at=200.0) if isinstance(c, LaunchNode)
    ]
    assert launch.avoid == ("host1",)
    job.connect(4, claims=4)
    rejoin(job, 2, 3, 4)
    [launch] = [
        c for c in job.give(NodeExited(2, "it ended"), at=3700.0) if isinstance(c, LaunchNode)
    ]
    assert launch.avoid == ()


def test_a_node_that_came_by_itself_is_dismissed_and_its_host_kept_out():
    job = JobDriver.running(3, min_nodes=2)
    commands = job.fail(1, BROKEN, at=100.0)
    assert kinds(commands) == [Dismiss, CallToRound, CallToRound]
    assert commands[0].node_id == 1
    assert "was given up (rank 2 lost its device" in commands[0].message.outcome.reason
    rejoin(job, 0, 2)

    back = Hello("another process", -1, -1, "host1", 0)
    commands = job.give(back, at=1100.0)
    assert kinds(commands) == [Greet, Dismiss]
    assert (
        "host host1 is kept out of the job for 2600 s more (exclusion_cooldown): rank 2 lost its device"
        in commands[1].message.outcome.reason
    )
    assert job.status(3) is NodeStatus.LOST

    job.give(Hello("a third process", -1, -1, "host1", 0), at=3700.0)
    assert job.status(4) is NodeStatus.READY


def test_a_node_is_kept_where_the_others_are_too_few():
    job = JobDriver.running(3, min_nodes=3)
    assert kinds(job.fail(1, BROKEN, at=100.0)) == [CallToRound] * 3
    assert actions(job) == [Action.RESTART]
    assert job.emitted(events.HostExcluded) == []


def test_a_host_that_is_kept_out_is_let_in_where_the_others_are_too_few():
    job = JobDriver.running(3, min_nodes=2)
    job.fail(1, BROKEN, at=100.0)
    rejoin(job, 0, 2)
    job.give(NodeExited(2, "it ended"), at=200.0)
    job.give(Hello("another process", -1, -1, "host1", 0))
    assert job.status(3) is NodeStatus.READY


def test_an_evicted_node_has_its_host_kept_out():
    job = JobDriver.launched()
    commands = job.give(NodeExited(1, "Evicted: the node was low on resource: memory"), at=100.0)
    [launch] = [c for c in commands if isinstance(c, LaunchNode)]
    assert launch.avoid == ("host1",)
    assert [event.cause for event in job.emitted(events.RestartDecided)] == ["evicted"]
    job = JobDriver.launched()
    commands = job.give(NodeExited(1, "its agent ended"), at=100.0)
    assert [c.avoid for c in commands if isinstance(c, LaunchNode)] == [()]


def test_a_decision_that_comes_late_waits_for_the_node_that_takes_the_place():
    """The root cause turns out to ask for a relaunch when the round is about to be complete."""
    pytest.importorskip("re2")
    row = Rule(
        cause="peer", text="Connection closed", origin="infrastructure", action=Action.RELAUNCH,
        echo=True, title="lost its peers", advice="x",
    )  # fmt: skip
    job = JobDriver.launched(diagnosis_rules=(row,))
    job.fail(1, ECHO, at=100.0)
    assert actions(job) == []
    commands = job.join(0, 1, 2)
    assert kinds(commands) == [KillNode, LaunchNode]
    assert job.machine.state.phase is Phase.RESTARTING
    job.connect(3, claims=3)
    assert {c.node_id for c in job.join(3)} == {0, 2, 3}


# ---- repetition


def fail_and_recover(job, details, *, node=0, at, nodes=(0, 1, 2)):
    commands = job.fail(node, details, at=at, id=f"{at}", steps=int(at))
    if job.machine.state.phase is Phase.RESTARTING and job.status(node) is not NodeStatus.LOST:
        rejoin(job, *nodes, at=at + 1)
    return commands


def test_a_node_that_fails_again_and_again_is_launched_elsewhere():
    job = JobDriver.launched(limits=Limits(node_fault_limit=3))
    for at in (100.0, 200.0, 300.0):
        commands = fail_and_recover(job, KILLED, at=at)
    assert actions(job) == [Action.RESTART, Action.RESTART, Action.RELAUNCH]
    assert [c for c in commands if isinstance(c, LaunchNode)] == [LaunchNode(3, 0, ("host0",))]


@pytest.mark.parametrize(
    ("details", "every", "limit"),
    [
        (KILLED, 2000.0, 3),
        (KILLED, 100.0, 0),
        (BUG, 100.0, 3),
        (ECHO, 100.0, 3),
    ],
    ids=["seldom", "never by setting", "the program's fault", "echoes"],
)
def test_what_does_not_count_against_a_node(details, every, limit):
    limits = Limits(node_fault_limit=limit, no_progress_restarts=100)
    job = JobDriver.launched(limits=limits, max_restarts=100)
    for number in range(1, 6):
        fail_and_recover(job, details, at=every * number)
    assert actions(job) == [Action.RESTART] * 5


def test_faults_of_two_nodes_are_counted_apart():
    job = JobDriver.launched(limits=Limits(node_fault_limit=3))
    for number in range(4):
        fail_and_recover(job, KILLED, node=number % 2, at=100.0 * (number + 1))
    assert actions(job) == [Action.RESTART] * 4


# ---- fresh processes, more memory, budgets


def test_after_a_crash_the_nodes_workers_start_afresh_and_only_these():
    job = JobDriver.launched()
    job.fail(1, CRASHED, at=100.0)
    worlds = rejoin(job, 0, 1, 2)
    assert {c.node_id: c.message.fresh for c in worlds} == {0: False, 1: True, 2: False}
    job.give(NodeExited(0, "it ended"), at=200.0)
    job.connect(3, claims=3)
    assert not any(c.message.fresh for c in rejoin(job, 1, 2, 3))


def test_a_node_that_comes_back_hears_again_that_it_starts_afresh():
    job = JobDriver.launched()
    job.fail(1, CRASHED, at=100.0)
    rejoin(job, 0, 1, 2)
    assert job.connect(1)[-1].message.fresh


def test_more_memory_is_asked_for_where_the_platform_can_give_it():
    job = JobDriver.launched(grows_memory=True)
    commands = job.fail(1, OUT_OF_MEMORY, at=100.0)
    assert [c for c in commands if isinstance(c, LaunchNode)] == [LaunchNode(3, 1, (), 2.0)]
    assert job.emitted(events.HostExcluded) == []
    job.give(MasterStarted(9))
    job.give(NodeExited(3, "it ended"))
    assert job.machine.nodes[4].memory_factor == 2.0


def test_elsewhere_a_kill_for_want_of_memory_is_a_restart():
    job = JobDriver.launched()
    assert kinds(job.fail(1, OUT_OF_MEMORY, at=100.0)) == [CallToRound] * 3
    assert actions(job) == [Action.MORE_MEMORY]


def test_a_cause_may_have_a_budget_of_its_own():
    limits = Limits(cause_budgets={"host_oom": 1}, restart_window=1000.0)
    job = JobDriver.launched(limits=limits)
    fail_and_recover(job, OUT_OF_MEMORY, at=100.0)
    fail_and_recover(job, KILLED, at=200.0)
    fail_and_recover(job, OUT_OF_MEMORY, at=1150.0)
    assert job.machine.state.phase is Phase.RUNNING
    job.fail(0, OUT_OF_MEMORY, at=1200.0)
    assert job.machine.outcome.exit_code == ExitCode.INFRASTRUCTURE
    assert job.machine.outcome.reason.endswith(
        "; 1 restarts for host_oom within 1000 s are used (cause_budgets)."
    )


class Recorded(JobMachine):
    """A machine that keeps what it was given."""

    def handle(self, event, now):
        self.__dict__.setdefault("_journal", []).append((now, event))
        return super().handle(event, now)


def test_the_journal_gives_the_state_back_whatever_was_done(monkeypatch):
    monkeypatch.setattr("tests.support.drivers.JobMachine", Recorded)
    job = JobDriver.launched(limits=Limits(node_fault_limit=2, cause_budgets={"killed": 9}))
    job.fail(1, CRASHED, at=100.0)
    rejoin(job, 0, 1, 2)
    job.fail(1, KILLED, at=200.0)
    job.connect(3, claims=3)
    rejoin(job, 0, 2, 3)
    job.fail(2, BROKEN, at=300.0)
    copy = Recorded()
    for now, event in list(job.machine._journal):
        copy.handle(event, now)
    assert copy == job.machine
    assert copy.faults.excluded(300.0) == ("host1", "host2")


# ---- what no row knows


def test_an_unknown_failure_that_comes_back_on_one_host_alone_is_that_hosts():
    job = JobDriver.launched()
    for at in (100.0, 200.0):
        commands = job.fail(1, CRASHED, at=at, id=f"{at}", steps=17)
        if at == 100.0:
            rejoin(job, 0, 1, 2, at=101.0)
    assert actions(job) == [Action.RESTART_FRESH, Action.RELAUNCH]
    assert [c for c in commands if isinstance(c, LaunchNode)] == [LaunchNode(3, 1, ("host1",))]
    assert job.emitted(events.RestartDecided)[1].reason.endswith(
        "at step 17, and only on host host1"
    )


def test_an_unknown_failure_that_comes_back_elsewhere_is_the_programs():
    job = JobDriver.launched()
    job.fail(1, CRASHED, at=100.0, steps=17)
    rejoin(job, 0, 1, 2, at=101.0)
    job.fail(2, CRASHED, at=200.0, steps=17)
    outcome = job.machine.outcome
    assert outcome.exit_code == ExitCode.USER_CODE
    assert "in the same way at step 17 on the hosts host1 and host2" in outcome.reason


def test_where_the_training_resumed_tells_whether_it_is_the_same_step():
    job = JobDriver.launched()
    job.fail(1, CRASHED, at=100.0, steps=130, first_step=0)
    job.join(0, 1, 2, at=101.0)
    job.fail(2, CRASHED, at=200.0, steps=30, first_step=100)
    assert "at step 130 on the hosts host1 and host2" in job.machine.outcome.reason


def test_the_table_is_the_one_that_the_job_began_with():
    """A newer release has other rows; a journal of an older one replays as it was written."""
    row = Rule(cause="old_row", types=("RuntimeError",), origin=Origin.USER, title="x", advice="x")
    machine = JobMachine()
    machine.handle(Submitted(JobSpec(name="job"), rules=(row,)), 0.0)
    failure = Failure(
        id="1", kind=FailureKind.EXCEPTION, node_id=0, rank=0, local_rank=0, round=1,
        exception="RuntimeError", message="CUDA error: uncorrectable ECC error encountered",
    )  # fmt: skip
    assert machine.state.table.diagnose(failure).cause == "old_row"
    assert JobMachine().state.table.diagnose(failure).cause == "unknown"


def test_a_failure_is_diagnosed_once_and_replayed_with_its_verdict(monkeypatch):
    diagnosed = []
    diagnose = RuleTable.diagnose

    def counted(table, failure):
        diagnosed.append(failure.id)
        return diagnose(table, failure)

    monkeypatch.setattr(RuleTable, "diagnose", counted)
    job = JobDriver.launched()
    job.fail(1, BROKEN, at=100.0, id="broken")
    assert job.machine.incident.decided
    assert diagnosed.count("broken") == 1
    (report,) = job.emitted(events.WorkerFailed)
    job = JobDriver.launched()
    other = msgspec.structs.replace(report.verdict, title="as an older release saw it")
    job.give(events.WorkerFailed(report.failure, other), at=100.0)
    assert job.emitted(events.RestartDecided)[0].reason == "as an older release saw it"
