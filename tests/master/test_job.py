"""The job machine: how worlds form, and what failures do to them. Inputs in, commands out."""

import pytest

from dlrover.errors import ExitCode
from dlrover.master.machine.inputs import (
    Command,
    DeadlinePassed,
    EndJob,
    Greet,
    NodeDisconnected,
    NodeSilent,
    Progressed,
    Reported,
    Say,
)
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Phase
from dlrover.master.machine.waiting import waiting_for
from dlrover.rpc.messages import CallToRound, Dismiss, Hello, Succeeded, Welcome
from dlrover.spec import events
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.job import Limits
from dlrover.spec.node import LaunchNode, NodeStatus
from tests.support.drivers import JobDriver

KILLED = {"kind": FailureKind.SIGNAL, "signal": 9}
ERROR = {"kind": FailureKind.EXCEPTION, "exception": "ValueError", "message": "bad value"}
TYPO = {"kind": FailureKind.EXCEPTION, "exception": "SyntaxError", "message": "invalid syntax"}
ECHO = {"kind": FailureKind.EXCEPTION, "exception": "DistNetworkError", "message": "closed"}


def calls(*nodes: int, round_: int = 2, reason: str) -> list[Command]:
    return [Say(node, CallToRound(round_, reason)) for node in nodes]


def kinds(commands: list[Command]) -> list[type]:
    return [type(c.message if isinstance(c, Say) else c) for c in commands]


# ---- nodes come


def test_managed_nodes_are_launched_and_awaited():
    job = JobDriver(2, 2, managed_nodes=2)
    assert job.submitted == [LaunchNode(0, 0), LaunchNode(1, 1)]
    assert job.events[0] == events.JobSubmitted("job", 2, 2)
    assert job.events[-1] == events.RoundOpened(1, "the job starts", 2)
    assert job.connect(7, claims=1) == [Greet("agent 7", Welcome(1, 1, 15.0))]
    assert job.machine.state.phase is Phase.WAITING
    assert waiting_for(job.machine, 5.0) == (
        "waiting for node 0 (is being started), node 1 (is joining): 5 s of 600 s; 0 joined"
    )


def test_an_agent_keeps_its_node_and_another_one_gets_its_own():
    job = JobDriver()
    assert job.connect(0) == [Greet("agent 0", Welcome(0, 1, 15.0))]
    assert job.connect(0) == [Greet("agent 0", Welcome(0, 1, 15.0))]
    assert job.connect(1, claims=0) == [Greet("agent 1", Welcome(1, 1, 15.0))]
    assert job.emitted(events.NodeConnected) == [
        events.NodeConnected(0, "host0"),
        events.NodeConnected(1, "host1"),
    ]
    assert job.machine.nodes[1].hostname == "host1"


def test_an_agent_that_is_known_cannot_take_another_nodes_place():
    job = JobDriver(2, 2, managed_nodes=2)
    job.connect(0, claims=0)
    assert job.connect(0, claims=1) == [Greet("agent 0", Welcome(0, 1, 15.0))]
    assert job.status(1) is NodeStatus.PENDING


def test_nothing_ends_before_the_job_is_submitted():
    machine = JobMachine()
    machine.handle(Hello("agent", -1, -1, "host", 0), 0.0)
    assert machine.outcome is None


def test_a_world_is_formed_and_each_node_is_told_its_place():
    job = JobDriver(2, 2)
    job.connect(0), job.connect(1)
    job.join(0)
    commands = job.join(1, at=4.0)
    assert [
        (c.node_id, c.message.world.first_rank, c.message.world.world_size) for c in commands
    ] == [
        (0, 0, 4),
        (1, 2, 4),
    ]
    assert job.events[-1] == events.RoundCompleted(1, 2, 4, 4.0)
    assert (job.machine.state.phase, job.machine.rounds.world_size) == (Phase.RUNNING, 4)


def test_a_round_that_lacks_nodes_expires_and_says_so():
    job = JobDriver(2, 3)
    job.connect(0)
    job.join(0)
    assert waiting_for(job.machine, 30.0) == "waiting for 2 nodes, 1 joined: 30 s of 600 s"
    assert job.machine.deadline() == 600.0
    *_, dismissal, end = job.give(DeadlinePassed(), at=600.0)
    assert end == EndJob(dismissal.message.outcome)
    assert (end.outcome.exit_code, end.outcome.reason) == (
        ExitCode.INFRASTRUCTURE,
        "only 1 of at least 2 nodes joined round 1 within 600 s (join_timeout).",
    )


def test_a_round_that_lacks_nodes_names_what_keeps_one_from_starting():
    job = JobDriver(2, 2, managed_nodes=2)
    job.connect(0, claims=0)
    job.join(0)
    job.give(events.NodeWaits(1, "Pod digits-1 waits: ImagePullBackOff: Back-off pulling image."))
    end = job.give(DeadlinePassed(), at=600.0)[-1]
    assert end.outcome.reason == (
        "only 1 of at least 2 nodes joined round 1 within 600 s (join_timeout). "
        "Node 1: Pod digits-1 waits: ImagePullBackOff: Back-off pulling image."
    )


def test_a_node_that_joins_a_moment_too_late_is_called_and_taken_in():
    job = JobDriver.running(2)
    job.connect(2)
    assert job.join(2, round_=1) == calls(2, reason="round 1 is over")
    assert 2 not in job.machine.rendezvous.offers
    assert job.join(2, round_=2) == []
    assert job.give(DeadlinePassed(), at=41.0) == calls(0, 1, reason="1 more node joined")


def test_newcomers_that_come_together_cost_one_round():
    job = JobDriver.running(1, limits=Limits(scale_up_delay=5.0))
    job.connect(1)
    job.join(1, at=100.0)
    job.connect(2)
    job.join(2, at=103.0)
    assert job.join(2, at=104.0) == []
    assert job.machine.deadline() == 108.0
    assert job.give(DeadlinePassed(), at=108.0) == calls(0, reason="2 more nodes joined")
    assert len(job.join(0)) == 3
    assert job.machine.restarts.count == 0


def test_a_newcomer_that_goes_again_interrupts_nobody():
    job = JobDriver.running(2)
    job.connect(2)
    job.join(2, at=50.0)
    assert job.machine.deadline() == 51.0
    assert job.give(NodeSilent(2, 60.0), DeadlinePassed()) == []
    assert job.machine.deadline() == 51.0
    assert job.give(DeadlinePassed(), at=51.0) == []
    assert job.machine.deadline() is None


def test_a_newcomer_is_taken_in_with_the_next_fault():
    job = JobDriver.running(2)
    job.connect(2)
    job.join(2, at=50.0)
    job.fail(0, KILLED)
    assert job.machine.deadline() > 51.0
    assert len(job.join(0, 1)) == 3


def test_who_comes_while_a_round_collects_is_waited_for():
    job = JobDriver.running(2)
    job.fail(0, KILLED)
    job.connect(2)
    assert job.join(0, 1) == []
    assert len(job.join(2)) == 3


@pytest.mark.parametrize(
    "job",
    [JobDriver.running(3), JobDriver.running(2, max_nodes=4, node_unit=2)],
    ids=["full", "half a unit"],
)
def test_a_newcomer_that_makes_the_world_no_larger_waits(job):
    job.connect(9)
    job.join(max(job.machine.nodes))
    assert job.machine.deadline() is None


def test_a_job_that_is_about_to_end_takes_nobody_in():
    job = JobDriver.running(2)
    job.give(Reported(0, Succeeded(1)))
    job.connect(2)
    job.join(2)
    assert job.machine.deadline() is None
    assert isinstance(job.give(Reported(1, Succeeded(1)))[-1], EndJob)


# ---- failures


def test_a_failure_calls_every_node_to_a_new_round():
    job = JobDriver.running()
    reason = "rank 2 was killed by SIGKILL (signal 9) on node 1"
    assert job.fail(1, KILLED) == calls(0, 1, 2, reason=reason)
    assert [type(body) for body in job.events[-3:]] == [
        events.WorkerFailed,
        events.RestartDecided,
        events.RoundOpened,
    ]
    assert job.events[-1] == events.RoundOpened(2, reason, 3)
    assert job.machine.state.phase is Phase.RESTARTING
    assert waiting_for(job.machine, 12.0).startswith(
        "waiting for node 0 (is stopping its workers), node 1 (is stopping its workers)"
    )
    worlds = job.join(0, 2, 1)
    assert [(c.node_id, c.message.world.round, c.message.world.restart_count) for c in worlds] == [
        (0, 2, 1),
        (1, 2, 1),
        (2, 2, 1),
    ]


def test_a_hopeless_failure_ends_the_job_at_once():
    job = JobDriver.running(max_restarts=9)
    *dismissals, end = job.fail(1, TYPO)
    assert dismissals == [Say(node, Dismiss(end.outcome, store=True)) for node in range(3)]
    assert end.outcome.exit_code == ExitCode.USER_CODE
    assert end.outcome.reason.endswith("; a restart would fail in the same way.")
    assert end.outcome.failure.exception == "SyntaxError"
    assert job.machine.state.phase is Phase.FAILED


def test_failures_of_the_program_and_of_the_infrastructure_have_budgets_of_their_own():
    job = JobDriver.running(max_restarts=1)
    for number, details in enumerate([KILLED, ERROR, KILLED]):
        job.give(Progressed(number + 1, 5 + number))
        job.fail(0, details)
        job.join(0, 1, 2)
    assert (job.machine.restarts.count, job.machine.restarts.user_restarts) == (3, 1)
    job.give(Progressed(4, 1))
    assert job.fail(0, ERROR)[-1].outcome.exit_code == ExitCode.USER_CODE


def test_restarts_without_progress_end_the_job():
    job = JobDriver.running(max_restarts=9)
    for _ in range(3):
        job.fail(0, ERROR)
        job.join(0, 1, 2)
    assert job.fail(0, ERROR)[-1].outcome.exit_code == ExitCode.NO_PROGRESS


def test_a_program_without_steps_progresses_when_its_world_runs_for_a_minute():
    job = JobDriver.running()
    for number in range(6):
        job.fail(0, KILLED, at=100.0 * number + 90.0)
        job.join(0, 1, 2, at=100.0 * number + 91.0)
    assert job.machine.restarts.count == 6
    job.fail(0, KILLED, at=600.0)
    assert job.machine.restarts.stalled == 1


def test_an_echo_stops_the_workers_and_its_cause_decides():
    job = JobDriver.running()
    assert len(job.fail(0, ECHO)) == 3
    assert not job.emitted(events.RestartDecided)
    outcome = job.fail(2, ERROR)[-1].outcome
    assert (outcome.exit_code, outcome.failure.exception) == (ExitCode.USER_CODE, "ValueError")
    assert len(outcome.others) == 1


def test_echoes_without_a_cause_are_decided_on_when_the_round_is_complete():
    job = JobDriver.running()
    job.fail(0, ECHO)
    job.fail(1, ECHO)
    job.join(0, 1)
    assert not job.emitted(events.RestartDecided)
    assert len(job.join(2)) == 3
    assert len(job.emitted(events.RestartDecided)) == 1


def test_echoes_without_a_cause_may_end_the_job():
    job = JobDriver.running(limits=Limits(max_infrastructure_restarts=0))
    job.fail(0, ECHO)
    commands = job.join(0, 1, 2)
    assert kinds(commands) == [Dismiss] * 3 + [EndJob]
    assert commands[-1].outcome.failure.exception == "DistNetworkError"


def test_a_node_that_has_ended_well_is_why_the_others_lose_it():
    job = JobDriver.running()
    lost = "[pair.cc:553] Connection closed by peer [10.0.0.1]:18825"
    closed = ECHO | {"exception": "RuntimeError", "message": lost}
    failure = Failure(id="1", node_id=1, rank=2, local_rank=0, round=1, **closed)
    assert job.machine.recovery.admitted(failure).verdict.cause == "peer_lost"

    job.give(Reported(0, Succeeded(1)))
    report = job.machine.recovery.admitted(failure)
    assert (report.verdict.cause, report.verdict.echo) == ("peer_ended", True)
    assert report.verdict.evidence == "all ranks of node 0 ended without an error"

    job.give(report)
    commands = job.join(0, 1, 2)
    assert commands[-1].outcome.exit_code == ExitCode.USER_CODE


def test_a_lost_node_may_end_the_job():
    job = JobDriver.running(limits=Limits(max_infrastructure_restarts=0))
    commands = job.give(NodeSilent(1, 60.0))
    assert kinds(commands) == [Dismiss] * 2 + [EndJob]
    assert commands[-1].outcome.reason.startswith("node 1 was lost: it sent no heartbeat")


def test_an_echo_is_explained_by_a_lost_node():
    job = JobDriver.running()
    job.fail(0, ECHO)
    job.give(NodeDisconnected(1))
    job.give(DeadlinePassed(), at=20.0)
    assert [b.reason for b in job.emitted(events.RestartDecided)] == [
        "node 1 was lost: its connection did not come back"
    ]


def test_several_failures_of_a_round_are_one_incident():
    job = JobDriver.running()
    job.fail(0, KILLED)
    assert job.fail(1, KILLED) == []
    job.join(0, 1, 2)
    assert (job.machine.restarts.count, job.machine.rendezvous.round) == (1, 2)


def test_a_failure_that_is_reported_twice_counts_once():
    job = JobDriver.running()
    job.fail(0, ECHO)
    before = len(job.events)
    assert job.fail(0, ECHO) == []
    assert len(job.events) == before


def test_a_late_failure_of_an_earlier_round_costs_nothing():
    """The new world runs already: neither its budget nor its steps may suffer."""
    job = JobDriver.running()
    job.fail(0, KILLED)
    job.join(0, 1, 2)
    assert job.fail(1, ERROR, round=1, steps=70) == []
    assert job.machine.outcome is None
    assert (job.machine.restarts.count, job.machine.progress.steps) == (1, 0)


def test_a_failure_of_a_round_before_the_incident_is_no_part_of_it():
    job = JobDriver.running()
    for _ in range(2):
        job.fail(0, KILLED)
        job.join(0, 1, 2)
    job.fail(0, ECHO)
    assert job.fail(1, TYPO, round=1) == job.fail(1, TYPO, round=4) == []
    assert len(job.emitted(events.WorkerFailed)) == 3


@pytest.mark.parametrize("round_", [0, 2, -1, 10**9])
def test_a_failure_of_a_round_that_never_was_changes_nothing(round_):
    job = JobDriver.running()
    assert job.fail(1, TYPO, round=round_) == []
    assert job.machine.state.phase is Phase.RUNNING


def test_a_failure_of_a_round_that_has_yet_to_begin_changes_nothing():
    job = JobDriver.running(2)
    job.connect(2)
    job.join(2, at=50.0)
    job.give(DeadlinePassed(), at=51.0)
    assert job.fail(1, TYPO, round=2) == []
    assert len(job.join(0, 1)) == 3
    assert job.machine.restarts.count == 0


def test_the_first_step_ends_an_incident_and_faults_before_it_prolong_it():
    job = JobDriver.running()
    job.fail(0, KILLED, at=100.0)
    job.join(0, 1, 2, at=101.0)
    job.fail(1, KILLED, at=105.0)
    job.join(0, 1, 2, at=107.0)
    job.give(Progressed(3, 0), at=108.0)
    job.give(Progressed(2, 9), at=108.0)
    assert job.machine.incident is not None
    job.give(Progressed(3, 1), at=109.0)
    assert job.emitted(events.Recovered) == [events.Recovered(3, 9.0)]
    assert job.machine.incident is None


def test_steps_that_are_done_again_are_told():
    job = JobDriver.running()
    job.give(Progressed(1, 0, (), 400), Progressed(1, 5, (), 400))
    job.fail(0, KILLED, steps=12)
    job.join(0, 1, 2)
    job.give(Progressed(2, 0), Progressed(2, 1, (), 400), Progressed(2, 3, (), 400))
    (undone,) = job.emitted(events.StepsUndone)
    assert undone == events.StepsUndone(2, 412, 400)
    assert undone.sentence() == "Step 412 -> 400: 12 steps are done again."
    assert events.StepsUndone(2, 401, 400).sentence() == "Step 401 -> 400: 1 step is done again."


@pytest.mark.parametrize(("before", "after"), [(-1, 0), (0, -1), (0, 5)])
def test_nothing_is_told_to_be_done_again_where_that_is_not_known(before: int, after: int):
    job = JobDriver.running()
    job.give(Progressed(1, 5, (), before))
    job.fail(0, KILLED)
    job.join(0, 1, 2)
    job.give(Progressed(2, 1, (), after))
    assert job.emitted(events.StepsUndone) == []


def test_a_round_without_a_step_does_not_hide_how_far_the_one_before_came():
    job = JobDriver.running()
    job.give(Progressed(1, 5, (), 0))
    for _ in range(2):
        job.fail(0, KILLED)
        job.join(0, 1, 2)
    job.give(Progressed(3, 1, (), 2))
    assert job.emitted(events.StepsUndone) == [events.StepsUndone(3, 5, 2)]


def test_steps_are_summed_over_the_rounds():
    job = JobDriver.running()
    job.give(Progressed(1, 40))
    job.fail(0, KILLED, steps=43)
    job.give(Progressed(2, 99))
    assert job.machine.progress.total_steps == 43
    job.join(0, 1, 2)
    job.give(Progressed(2, 5), Progressed(2, 4))
    assert (job.machine.progress.steps, job.machine.progress.total_steps) == (5, 48)
