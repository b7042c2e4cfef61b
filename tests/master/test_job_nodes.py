"""The job machine: nodes and masters that go and come back, success, and the job's end."""

import pytest

from dlrover.errors import ExitCode
from dlrover.master.machine.inputs import (
    Command,
    DeadlinePassed,
    EndJob,
    Greet,
    KillNode,
    MasterStarted,
    NodeDisconnected,
    NodeExited,
    NodePlaced,
    NodeSilent,
    Progressed,
    Reported,
    Say,
    Submitted,
)
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Phase
from dlrover.master.machine.waiting import waiting_for
from dlrover.rpc.messages import (
    AssignWorld,
    CallToRound,
    Dismiss,
    Hello,
    StopRequest,
    Succeeded,
    Welcome,
)
from dlrover.spec import events
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import JobSpec
from dlrover.spec.node import LaunchNode, NodeStatus
from tests.support.drivers import JobDriver

KILLED = {"kind": FailureKind.SIGNAL, "signal": 9}
TYPO = {"kind": FailureKind.EXCEPTION, "exception": "SyntaxError", "message": "invalid syntax"}


def calls(*nodes: int, round_: int = 2, reason: str) -> list[Command]:
    return [Say(node, CallToRound(round_, reason)) for node in nodes]


# ---- nodes that do not start


def test_what_keeps_a_node_from_starting_is_told_once_and_shown_while_it_lasts():
    job = JobDriver(2, 2, managed_nodes=2)
    assert "node 1 (is being started)" in waiting_for(job.machine, job.now)
    job.give(events.NodeWaits(1, "pod b waits: no GPU"), events.NodeWaits(1, "pod b waits: no GPU"))
    assert job.emitted(events.NodeWaits) == [events.NodeWaits(1, "pod b waits: no GPU")]
    assert "node 1 (pod b waits: no GPU)" in waiting_for(job.machine, job.now)
    job.give(events.NodeWaits(1, ""))
    assert "node 1 (is being started)" in waiting_for(job.machine, job.now)
    job.connect(1, claims=1)
    job.give(events.NodeWaits(1, "late"))
    assert len(job.emitted(events.NodeWaits)) == 1


def test_a_node_whose_container_ran_out_of_memory_comes_back_with_more():
    for grows, factor in ((True, 2.0), (False, 1.0)):
        job = JobDriver.launched(grows_memory=grows)
        launched = [c for c in job.give(NodeExited(1, "OOMKilled")) if isinstance(c, LaunchNode)]
        assert launched == [LaunchNode(3, 1, (), factor)]


# ---- nodes go


def test_a_lost_node_that_the_platform_launched_is_killed_and_replaced_in_one_round():
    job = JobDriver.launched()
    reason = "node 1 was lost"
    assert job.give(NodeExited(1, "its agent ended")) == [
        KillNode(1),
        *calls(0, 2, reason=reason),
        LaunchNode(3, 1),
    ]
    assert job.emitted(events.NodeLaunched)[-1] == events.NodeLaunched(3, replaces=1)
    job.join(0, 2)
    job.connect(3, claims=3)
    worlds = job.join(3)
    assert [(c.node_id, c.message.world.node_rank, c.message.world.round) for c in worlds] == [
        (0, 0, 2),
        (3, 1, 2),
        (2, 2, 2),
    ]


def test_an_elastic_job_goes_on_with_the_survivors_at_once():
    job = JobDriver.launched(2, 3)
    job.give(NodeExited(1, "its agent ended"))
    job.join(0)
    assert [c.message.world.world_size for c in job.join(2)] == [4, 4]


def test_a_node_may_be_without_a_connection_for_a_while():
    job = JobDriver.running()
    assert job.give(NodeDisconnected(1), at=100.0) == []
    assert job.machine.deadline() == 103.0
    assert job.connect(1, runs=1) == [Greet("agent 1", Welcome(1, 2, 15.0))]
    assert job.machine.deadline() is None
    job.give(NodeDisconnected(1), at=200.0)
    assert job.give(DeadlinePassed(), at=203.0) == calls(0, 2, reason="node 1 was lost")
    assert job.status(1) is NodeStatus.LOST


def test_a_silent_node_is_lost():
    job = JobDriver.running()
    job.give(NodeSilent(1, 61.4))
    assert job.emitted(events.NodeLost) == [events.NodeLost(1, "it sent no heartbeat for 61 s")]
    assert job.give(NodeSilent(1, 80.0), NodeDisconnected(1), NodeExited(1, "gone")) == []
    assert job.join(1) == []


def test_nodes_that_are_lost_together_cost_one_round():
    job = JobDriver.running()
    job.give(NodeDisconnected(1), NodeDisconnected(2))
    job.give(DeadlinePassed(), at=99.0)
    assert job.machine.rendezvous.missing == {0}
    assert job.machine.restarts.count == 1
    assert len(job.join(0)) == 1


def test_what_returns_after_it_was_lost_is_a_new_node():
    job = JobDriver.running()
    job.give(NodeSilent(1, 60.0))
    assert job.connect(1, claims=1, runs=1) == [
        Greet("agent 1", Welcome(3, 2, 15.0)),
        Say(3, CallToRound(2, "a new round is open")),
    ]
    assert job.connect(1, claims=1)[0] == Greet("agent 1", Welcome(3, 2, 15.0))


def test_what_returns_after_it_was_replaced_is_dismissed():
    job = JobDriver.launched()
    job.give(NodeDisconnected(1))
    job.give(DeadlinePassed(), at=99.0)
    welcome, dismissal = job.connect(1, claims=1, runs=1)
    assert welcome == Greet("agent 1", Welcome(1, 2, 15.0))
    assert dismissal.message.outcome.exit_code == ExitCode.INFRASTRUCTURE
    assert dismissal.message.outcome.reason == (
        "node 1 was given up (its connection did not come back) and replaced."
    )
    assert job.join(1) == []
    assert 1 not in job.machine.rendezvous.offers


def test_only_what_the_platform_launched_is_replaced():
    job = JobDriver.launched(2, 3)
    job.give(Hello("guest", -1, 1, "host", 0))
    job.join(3)
    job.give(NodeSilent(3, 60.0))
    assert job.status(3) is NodeStatus.LOST
    assert len(job.machine.nodes) == 4


def test_a_node_that_its_platform_refuses_ends_the_job_at_once():
    job = JobDriver(1, 1, managed_nodes=1)
    outcome = job.give(NodeExited(0, "its pod was refused: no such volume", refused=True))[
        -1
    ].outcome
    assert (outcome.exit_code, outcome.reason) == (
        ExitCode.USAGE,
        "node 0 cannot be made: its pod was refused: no such volume.",
    )


def test_a_job_that_trains_without_a_refused_node_goes_on():
    job = JobDriver.launched(2, 3)
    (launched,) = [c for c in job.give(NodeExited(2, "killed")) if isinstance(c, LaunchNode)]
    assert job.give(NodeExited(launched.node_id, "its pod was refused", refused=True)) == []
    assert job.machine.outcome is None


def test_a_wrong_command_is_no_fault_of_the_machines():
    job = JobDriver(1, 1, managed_nodes=1)
    for node in range(3):
        last = job.give(NodeExited(node, "its container main ended with exit code 2", exit_code=2))
    assert last[-1].outcome.exit_code == ExitCode.USAGE


def test_restarts_that_earlier_masters_counted_are_counted_on():
    job = JobDriver.running(2, 1, 2, max_restarts=1, earlier_restarts=4)
    assert job.machine.restarts.count == 4
    job.machine.validate()


def test_nodes_that_cannot_be_started_end_the_job():
    job = JobDriver(1, 1, managed_nodes=1)
    assert job.give(NodeExited(0, "no room")) == [LaunchNode(1, 0)]
    job.connect(1, claims=1)
    assert job.give(NodeExited(1, "no room")) == [LaunchNode(2, 0)]
    outcome = job.give(NodeExited(2, "no room"))[-1].outcome
    assert (outcome.exit_code, outcome.reason) == (
        ExitCode.INFRASTRUCTURE,
        "node 2 could not be started in 3 attempts: no room.",
    )


def test_nodes_that_something_else_ends_before_they_join_do_not_end_the_job():
    job = JobDriver(1, 1, managed_nodes=1)
    for node in range(9):
        preempted = NodeExited(node, "its pod was deleted: PreemptionByScheduler", removed=True)
        assert job.give(preempted) == [LaunchNode(node + 1, 0)]
    late = job.give(DeadlinePassed(), at=700.0)[-1].outcome
    assert late.exit_code == ExitCode.INFRASTRUCTURE


def test_a_node_that_has_run_lets_the_attempts_begin_anew():
    job = JobDriver(1, 1, managed_nodes=1)
    for attempt in range(3):
        job.give(NodeExited(2 * attempt, "no room"))
        job.connect(2 * attempt + 1, claims=2 * attempt + 1)
        job.join(2 * attempt + 1)
        job.give(Progressed(attempt + 1, 1))
        assert isinstance(job.give(NodeExited(2 * attempt + 1, "died"))[-1], LaunchNode)


def test_the_attempts_begin_when_a_node_that_has_run_is_lost():
    job = JobDriver.launched(1, 1)
    assert isinstance(job.give(NodeExited(0, "died"))[-1], LaunchNode)
    for node in (1, 2):
        assert job.machine.outcome is None
        job.give(NodeExited(node, "no room"))
    assert job.machine.outcome is None


def test_a_node_that_is_placed_after_it_was_lost_is_killed():
    job = JobDriver(1, 1, managed_nodes=1)
    job.give(NodeExited(0, "it cannot be started"))
    assert job.give(NodePlaced(0, "process")) == [KillNode(0)]


def test_an_offer_without_a_connection_does_not_count():
    job = JobDriver(2, 2)
    job.connect(0), job.connect(1)
    job.join(0)
    job.give(NodeDisconnected(0))
    assert job.join(1) == []
    assert "node 0 (has no connection)" in waiting_for(job.machine, 0.0)
    job.connect(0)
    assert len(job.join(0)) == 2


def test_a_survivor_that_takes_too_long_is_left_behind_and_taken_in_later():
    job = JobDriver.running(min_nodes=2)
    job.fail(0, KILLED, at=100.0)
    job.join(0, 1, at=101.0)
    deadline = 101.0 + 30.0 + 30.0
    assert job.machine.deadline() == deadline
    assert len(job.give(DeadlinePassed(), at=deadline)) == 2
    assert job.status(2) is NodeStatus.READY
    assert job.join(2, round_=2) == calls(2, round_=3, reason="round 2 is over")
    job.join(2)
    job.give(DeadlinePassed(), at=deadline + 1.0)
    assert len(job.join(0, 1)) == 3


def test_losing_a_node_that_was_left_behind_is_no_fault():
    job = JobDriver.running(min_nodes=2)
    job.fail(0, KILLED, at=100.0)
    job.join(0, 1, at=101.0)
    job.give(DeadlinePassed(), at=161.0)
    assert job.give(NodeSilent(2, 60.0)) == []
    assert job.machine.state.phase is Phase.RUNNING


def test_losing_a_node_while_the_world_grows_is_a_fault_of_the_last_world():
    job = JobDriver.running(2)
    job.connect(2)
    job.join(2, at=50.0)
    job.give(DeadlinePassed(), at=51.0)
    assert job.give(NodeSilent(1, 60.0)) == []
    assert job.machine.restarts.count == 1
    assert len(job.join(0)) == 2


# ---- nodes succeed


def test_the_job_succeeds_when_all_nodes_have():
    job = JobDriver.running()
    job.give(Progressed(1, 7))
    assert job.give(Reported(0, Succeeded(1)), Reported(2, Succeeded(1))) == []
    *dismissals, end = job.give(Reported(1, Succeeded(1)), at=25.0)
    assert dismissals == [Say(node, Dismiss(end.outcome)) for node in range(3)]
    assert (end.outcome.exit_code, end.outcome.steps, end.outcome.seconds) == (0, 7, 25.0)
    assert end.outcome.job_dir == "/jobs/1"
    assert job.machine.state.phase is Phase.SUCCEEDED


def test_a_node_that_goes_after_it_succeeded_is_not_missed():
    job = JobDriver.launched()
    job.give(Reported(1, Succeeded(1)))
    assert job.give(NodeExited(1, "its agent ended"), NodeDisconnected(1)) == []
    assert job.machine.deadline() is None
    job.give(Reported(0, Succeeded(1)))
    assert isinstance(job.give(Reported(2, Succeeded(1)))[-1], EndJob)
    assert job.emitted(events.NodeSucceeded) == [events.NodeSucceeded(i) for i in (1, 0, 2)]


def test_success_that_is_said_again_counts_once():
    job = JobDriver.running()
    job.give(Reported(1, Succeeded(1)), Reported(1, Succeeded(1)))
    assert len(job.emitted(events.NodeSucceeded)) == 1
    assert job.connect(1) == [Greet("agent 1", Welcome(1, 2, 15.0))]
    job.fail(0, KILLED)
    job.join(1)
    job.give(Reported(1, Succeeded(2)))
    assert job.status(1) is NodeStatus.READY


def test_a_node_that_had_succeeded_and_is_lost_while_a_round_collects_is_replaced():
    job = JobDriver.launched(2, 3)
    job.give(Reported(1, Succeeded(1)))
    job.fail(0, KILLED)
    assert job.give(NodeExited(1, "its agent ended")) == [KillNode(1), LaunchNode(3, 1)]
    assert job.machine.restarts.count == 1
    job.join(0)
    assert len(job.join(2)) == 2


def test_a_node_that_went_after_it_succeeded_is_buried_once():
    job = JobDriver.launched(2, 3)
    job.give(Reported(1, Succeeded(1)), NodeExited(1, "its agent ended"))
    for _ in range(2):
        job.fail(0, KILLED)
        job.join(0, 2)
    assert job.emitted(events.NodeLost) == [events.NodeLost(1, "its agent ended")]


def test_a_node_that_went_after_it_succeeded_is_replaced_when_a_new_round_opens():
    job = JobDriver.launched()
    job.give(Reported(1, Succeeded(1)), NodeExited(1, "its agent ended"), NodeDisconnected(1))
    commands = job.fail(0, KILLED)
    assert commands[:2] == [KillNode(1), LaunchNode(3, 1)]
    assert [c.node_id for c in commands[2:]] == [0, 2]


def test_a_node_that_comes_back_after_it_succeeded_is_still_there():
    job = JobDriver.running()
    job.give(Reported(1, Succeeded(1)), NodeDisconnected(1))
    job.give(DeadlinePassed(), at=99.0)
    assert job.connect(1, runs=1) == [Greet("agent 1", Welcome(1, 2, 15.0))]
    assert [c.node_id for c in job.fail(0, KILLED)] == [0, 1, 2]


@pytest.mark.parametrize("round_", [0, 2, 10**9])
def test_success_in_another_round_changes_nothing(round_):
    job = JobDriver.running()
    job.give(Reported(1, Succeeded(round_)))
    assert job.status(1) is NodeStatus.RUNNING


# ---- what was missed without a connection


def test_a_call_that_was_missed_is_made_again():
    job = JobDriver.running()
    job.give(NodeDisconnected(1))
    assert [c.node_id for c in job.fail(0, KILLED)] == [0, 2]
    assert job.connect(1, runs=1) == [
        Greet("agent 1", Welcome(1, 2, 15.0)),
        Say(1, CallToRound(2, "a new round is open")),
    ]


def test_a_world_that_was_missed_is_assigned_again():
    job = JobDriver.running()
    world = job.machine.rounds.worlds[1]
    assert job.connect(1) == [Greet("agent 1", Welcome(1, 2, 15.0)), Say(1, AssignWorld(world))]
    assert job.join(1) == []


def test_a_node_whose_world_is_over_is_called():
    job = JobDriver.running(2)
    assert job.connect(5, runs=4)[-1] == Say(
        2, CallToRound(5, "the world went on without this node")
    )


# ---- the master goes


def test_a_new_master_gives_the_nodes_time_to_come_back():
    job = JobDriver.running()
    assert job.give(MasterStarted(17), at=100.0) == []
    assert job.events[-1] == events.MasterRecovered(17)
    assert job.machine.deadline() == 115.0
    for node in range(3):
        assert len(job.connect(node, runs=1)) == 1
    assert job.machine.deadline() is None
    assert job.machine.state.phase is Phase.RUNNING


def test_the_first_master_recovers_nothing():
    job = JobDriver(1, 1, managed_nodes=1)
    assert job.give(MasterStarted(0)) == []
    assert not job.emitted(events.MasterRecovered)


def test_a_new_master_launches_what_the_last_one_may_not_have():
    job = JobDriver(2, 2, managed_nodes=2)
    job.give(NodePlaced(0, "process"))
    assert job.give(MasterStarted(3)) == [LaunchNode(1, 1)]
    assert job.machine.deadline() == job.machine.rendezvous.expires_at()


def test_a_new_master_waits_for_no_node_that_is_lost_or_went_after_it_succeeded():
    job = JobDriver.launched(2, 3)
    job.give(NodeSilent(0, 60.0))
    job.join(1, 2)
    job.give(Reported(1, Succeeded(2)), NodeExited(1, "its agent ended"), MasterStarted(9))
    assert list(job.machine.state.lost_at) == [2]


def test_the_time_without_a_master_does_not_count_against_a_round():
    job = JobDriver(2, 2)
    job.connect(0)
    job.join(0)
    job.give(MasterStarted(3), at=5000.0)
    assert job.machine.outcome is None
    job.connect(0), job.connect(1)
    job.join(0)
    assert len(job.join(1)) == 2


def test_a_new_master_of_an_ended_job_launches_nothing_and_dismisses_who_comes_back():
    job = JobDriver(1, 2, managed_nodes=2)
    job.give(NodePlaced(0, "process"))
    job.connect(0, claims=0)
    job.give(StopRequest("enough", ExitCode.STOPPED))
    assert job.give(MasterStarted(5)) == []
    assert job.connect(0, claims=0) == [
        Greet("agent 0", Welcome(0, 1, 15.0)),
        Say(0, Dismiss(job.machine.outcome, store=True)),
    ]


# ---- the end


@pytest.mark.parametrize(
    ("exit_code", "phase"),
    [
        (ExitCode.STOPPED, Phase.STOPPED),
        (ExitCode.SIGNAL_BASE + 2, Phase.STOPPED),
        (ExitCode.INFRASTRUCTURE, Phase.FAILED),
        (77, Phase.FAILED),
    ],
)
def test_a_stopped_job_dismisses_its_nodes(exit_code, phase):
    job = JobDriver.running(2)
    *dismissals, end = job.give(StopRequest("enough", exit_code))
    assert dismissals == [Say(node, Dismiss(end.outcome, store=True)) for node in range(2)]
    assert (end.outcome.exit_code, end.outcome.reason) == (exit_code, "enough")
    assert job.machine.state.phase is phase
    assert job.give(StopRequest("again", 1)) == []
    assert job.machine.deadline() is None


def test_nodes_that_have_not_connected_yet_are_killed_at_the_end():
    job = JobDriver(1, 1, managed_nodes=1)
    job.give(NodePlaced(0, "process"))
    assert KillNode(0) in job.give(StopRequest("enough", ExitCode.STOPPED))
    assert job.give(NodeExited(0, "killed")) == []


def test_a_node_whose_connection_broke_may_come_back_after_the_end_and_is_dismissed():
    job = JobDriver.launched()
    job.give(NodeDisconnected(1))
    *commands, end = job.give(StopRequest("enough", ExitCode.STOPPED))
    assert KillNode(1) not in commands
    assert job.connect(1)[-1] == Say(1, Dismiss(end.outcome, store=True))
    assert job.give(NodeExited(1, "its agent left")) == []
    assert job.status(1) is NodeStatus.RELEASED


def test_a_node_that_is_placed_after_the_end_is_killed():
    job = JobDriver(1, 1, managed_nodes=1)
    job.give(StopRequest("enough", ExitCode.STOPPED))
    assert job.give(NodePlaced(0, "process")) == [KillNode(0)]


def test_a_node_that_is_placed_when_it_leaves_already_is_let_go():
    job = JobDriver(1, 1, managed_nodes=1)
    job.connect(0, claims=0)
    job.give(StopRequest("enough", ExitCode.STOPPED))
    assert job.give(NodePlaced(0, "process")) == []


def test_what_returns_after_the_end_though_it_was_replaced_gets_the_jobs_outcome():
    job = JobDriver.launched()
    job.give(NodeSilent(1, 60.0))
    *_, end = job.give(StopRequest("enough", ExitCode.STOPPED))
    assert job.connect(1)[-1] == Say(1, Dismiss(end.outcome, store=True, partial=True))


def test_a_node_that_is_lost_is_not_killed_again_at_the_end():
    job = JobDriver.launched()
    job.give(NodeSilent(1, 60.0))
    assert KillNode(1) not in job.give(StopRequest("enough", ExitCode.STOPPED))


def test_a_job_that_ends_before_its_world_is_formed_waits_for_nothing():
    job = JobDriver(2, 2)
    job.give(StopRequest("enough", ExitCode.STOPPED), at=7.0)
    assert job.machine.deadline() is None
    assert waiting_for(job.machine, 9.0) == ""
    assert job.give(DeadlinePassed(), at=9999.0) == []
    assert job.emitted(events.JobEnded) == [events.JobEnded(ExitCode.STOPPED, "enough")]


def test_a_jobs_seconds_begin_when_it_is_submitted():
    machine = JobMachine()
    machine.handle(Submitted(JobSpec(name="job")), 50.0)
    machine.handle(StopRequest("enough", ExitCode.STOPPED), 57.0)
    assert machine.outcome.seconds == 7.0


@pytest.mark.parametrize("node", [1, 7], ids=["known", "unknown"])
def test_who_connects_after_the_end_is_welcomed_only_to_be_dismissed(node):
    """The welcome opens the way on which the dismissal goes."""
    job = JobDriver.running(2)
    job.give(NodeDisconnected(1), StopRequest("enough", ExitCode.STOPPED))
    welcome, dismissal = job.connect(node, runs=1)
    assert dismissal == Say(welcome.message.node_id, Dismiss(job.machine.outcome, store=True))
    assert job.events[-1] == events.JobEnded(ExitCode.STOPPED, "enough")


def test_a_node_that_waited_for_a_round_leaves_with_the_job():
    job = JobDriver(2, 2)
    job.connect(0)
    job.join(0)
    job.give(StopRequest("enough", ExitCode.STOPPED), NodeExited(0, "its agent left"))
    assert job.status(0) is NodeStatus.RELEASED


def test_after_the_end_silence_and_late_words_change_nothing():
    job = JobDriver.running()
    job.give(StopRequest("enough", ExitCode.STOPPED))
    before = len(job.events)
    assert job.give(NodeSilent(1, 99.0), Reported(1, Succeeded(1)), Progressed(1, 9)) == []
    assert job.give(MasterStarted(9), DeadlinePassed()) == []
    assert job.fail(1, TYPO) == job.join(1) == []
    assert len(job.events) == before
    assert job.status(1) is NodeStatus.RUNNING


class Counted(dict):
    """Counts how often an entry is looked up."""

    looks = 0

    def __getitem__(self, key: int) -> object:
        Counted.looks += 1
        return super().__getitem__(key)


def looks(count: int) -> int:
    """Lookups of single nodes while a full world of some nodes gets as many spares, and ends."""
    job = JobDriver.running(count, count, count)
    job.machine.validate = lambda: None  # it looks at all of them
    state = job.machine.state
    state.nodes = job.machine.nodes = Counted(state.nodes)
    state.rendezvous.offers = Counted(state.rendezvous.offers)
    Counted.looks = 0
    for node in range(count, 2 * count):
        job.connect(node)
        job.join(node)
    job.give(*(Reported(node, Succeeded(1)) for node in range(count)))
    assert job.machine.outcome is not None
    return Counted.looks


def test_what_one_node_says_costs_the_same_however_many_there_are():
    """The master handles one input after the other: with thousands of nodes, a look at all takes minutes."""
    assert looks(80) < 3 * looks(40)
