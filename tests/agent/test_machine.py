"""When an agent joins, starts and stops its workers, and what it says."""

import signal

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dlrover.agent.machine.node import (
    Abandon,
    AgentMachine,
    Command,
    EndWorker,
    FlushMemory,
    Input,
    JoinRound,
    Stage,
    StopWorkers,
    WorkerEnded,
    WorkersStopped,
)
from dlrover.rpc.messages import (
    AssignWorld,
    CallToRound,
    Dismiss,
    Failed,
    Leaving,
    StartAgain,
    Succeeded,
    Welcome,
)
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.outcome import Outcome
from dlrover.spec.requests.membership import Members
from dlrover.spec.world import World

DONE = Outcome(exit_code=0, reason="All workers succeeded.")
STOPPED_JOB = Outcome(exit_code=143, reason="The agent was stopped by SIGTERM.")


def world(round_: int = 1) -> World:
    return World(round_, 0, 0, 1, 0, 2, "10.0.0.1", 29400)


def failure(round_: int = 1, local_rank: int = 0) -> Failure:
    return Failure(
        id=f"failure {round_} {local_rank}",
        kind=FailureKind.EXIT,
        node_id=3,
        rank=local_rank,
        local_rank=local_rank,
        round=round_,
        exit_code=1,
    )


def welcome(round_: int = 1) -> Welcome:
    return Welcome(3, round_, 15.0)


def call(round_: int, *, store: bool = False) -> CallToRound:
    return CallToRound(round_, "a worker failed", store)


def give(machine: AgentMachine, *events: Input) -> list[Command]:
    """What the last of the events leads to."""
    commands: list[Command] = []
    for event in events:
        commands = machine.handle(event)
        machine.validate()
    return commands


def agent(*events: Input) -> AgentMachine:
    """An agent of two workers to which these things have happened."""
    machine = AgentMachine(nproc=2)
    give(machine, *events)
    return machine


def running() -> AgentMachine:
    return agent(welcome(), AssignWorld(world()))


def failed() -> AgentMachine:
    machine = running()
    give(machine, WorkerEnded(0, failure()))
    return machine


def succeeded() -> AgentMachine:
    machine = running()
    give(machine, WorkerEnded(0, None), WorkerEnded(1, None))
    return machine


def stopping() -> AgentMachine:
    machine = running()
    give(machine, call(2))
    return machine


def joined_again() -> AgentMachine:
    machine = failed()
    give(machine, call(2), WorkersStopped())
    return machine


# ---- from the first word to the last


def test_it_joins_the_round_that_it_is_welcomed_to():
    machine = agent()
    assert give(machine, welcome(4)) == [JoinRound(4)]
    assert (machine.stage, machine.node_id) == (Stage.JOINED, 3)


def test_it_starts_its_workers_in_the_world_that_it_is_assigned():
    machine = agent(welcome())
    assert give(machine, AssignWorld(world(7))) == [AssignWorld(world(7))]
    assert (machine.stage, machine.round, machine.running_round) == (Stage.RUNNING, 7, 7)
    assert machine.running == {0, 1}


def test_it_reports_success_once_all_workers_have_succeeded():
    machine = running()
    assert give(machine, WorkerEnded(1, None)) == []
    assert give(machine, WorkerEnded(0, None)) == [Succeeded(1)]
    assert machine.stage is Stage.SUCCEEDED


def test_it_reports_every_failure_and_waits_for_the_masters_word():
    machine = running()
    assert give(machine, WorkerEnded(0, failure())) == [Failed(failure())]
    assert give(machine, WorkerEnded(1, failure(local_rank=1))) == [Failed(failure(local_rank=1))]
    assert machine.stage is Stage.FAILED


def test_a_success_after_a_failure_is_no_success():
    assert give(failed(), WorkerEnded(1, None)) == []


@pytest.mark.parametrize("make", [running, failed, succeeded])
def test_a_call_to_a_new_round_stops_the_workers_before_it_joins(make):
    machine = make()
    assert give(machine, call(2)) == [StopWorkers()]
    assert give(machine, WorkersStopped()) == [JoinRound(2)]
    assert (machine.stage, machine.running_round) == (Stage.JOINED, 0)


@pytest.mark.parametrize("event", [call(2, store=True), Dismiss(STOPPED_JOB, store=True)])
def test_where_a_node_leaves_what_is_in_memory_is_stored(event):
    assert give(running(), event) == [FlushMemory(), StopWorkers()]
    assert give(stopping(), event) == [FlushMemory()]
    after = Dismiss(STOPPED_JOB) if isinstance(event, Dismiss) else JoinRound(2)
    assert give(joined_again(), event) == [FlushMemory(), after]


def test_at_the_end_of_a_job_its_savers_learn_whether_nodes_are_lost():
    event = Dismiss(STOPPED_JOB, store=True, partial=True)
    assert give(running(), event) == [FlushMemory(partial=True), StopWorkers()]


@pytest.mark.parametrize("store", [True, False])
def test_a_node_that_is_told_to_end_says_so_and_stores_what_is_in_memory(store):
    notice, flush = Leaving(STOPPED_JOB.reason), [FlushMemory()] if store else []
    machine = running()
    assert give(machine, Abandon(STOPPED_JOB, store)) == [notice, *flush, StopWorkers()]
    assert give(machine, Abandon(DONE, store)) == []
    later = [] if store else [FlushMemory()]
    assert give(machine, Dismiss(DONE, store=True)) == later, "the whole job is stopped, too"
    assert give(machine, Dismiss(DONE, store=True)) == []
    assert give(machine, welcome(2)) == [notice], "a master that has just come does not know"
    assert give(machine, WorkersStopped()) == [Dismiss(STOPPED_JOB)]
    assert give(agent(), Abandon(STOPPED_JOB, store)) == [notice, *flush, Dismiss(STOPPED_JOB)]


def test_it_reports_which_round_it_has_left():
    assert (running().holding(0).left, joined_again().holding(0).left) == (0, 1)


def test_without_workers_it_joins_at_once():
    assert give(agent(welcome()), call(2)) == [JoinRound(2)]


def test_a_later_call_while_it_stops_is_the_round_that_it_joins():
    machine = stopping()
    assert give(machine, call(3)) == []
    assert give(machine, WorkersStopped()) == [JoinRound(3)]


def test_it_obeys_a_master_that_has_lost_rounds():
    """A crash of the master's machine may take the end of its journal."""
    machine = agent(welcome(), AssignWorld(world(5)))
    assert give(machine, call(5)) == [StopWorkers()]
    assert give(machine, WorkersStopped(), AssignWorld(world(5))) == [AssignWorld(world(5))]


def test_a_failure_while_it_stops_is_reported():
    assert give(stopping(), WorkerEnded(1, failure())) == [Failed(failure())]


def test_an_ended_worker_is_started_again_once_for_each_attempt():
    machine = failed()
    order = StartAgain(1, {0: 1})
    assert give(machine, order) == [order]
    assert (machine.stage, machine.running, machine.failures) == (Stage.RUNNING, {0, 1}, [])
    assert give(machine, order) == []
    assert give(machine, WorkerEnded(0, None), WorkerEnded(1, None)) == [Succeeded(1)]


def test_a_worker_of_another_round_is_not_started_again():
    machine = failed()
    assert give(machine, StartAgain(2, {0: 1})) == []
    assert machine.stage is Stage.FAILED


def test_a_worker_that_has_lost_its_row_is_ended_and_started_again():
    machine = failed()
    assert give(machine, StartAgain(1, {0: 2, 1: 2})) == [EndWorker(1), StartAgain(1, {0: 2})]
    assert give(machine, StartAgain(1, {0: 2, 1: 3}), StartAgain(1, {1: 2})) == []
    killed = msgspec.structs.replace(failure(), kind=FailureKind.SIGNAL, signal=signal.SIGKILL)
    assert give(machine, WorkerEnded(1, killed)) == [StartAgain(1, {1: 3})]
    assert (machine.stage, machine.failures) == (Stage.RUNNING, [])


def test_what_ended_a_worker_before_it_was_ended_for_its_row_is_reported():
    machine = failed()
    give(machine, StartAgain(1, {0: 2, 1: 2}))
    assert give(machine, WorkerEnded(1, failure())) == [Failed(failure()), StartAgain(1, {1: 2})]
    assert (machine.stage, machine.failures) == (Stage.RUNNING, [])


def test_failures_of_a_past_world_are_forgotten_in_the_next_one():
    machine = joined_again()
    give(machine, AssignWorld(world(2)))
    assert give(machine, welcome(3)) == []


# ---- after a reconnection it says again what still holds


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: agent(welcome()), [JoinRound(9)]),
        (running, []),
        (failed, [Failed(failure())]),
        (succeeded, [Succeeded(1)]),
        (stopping, []),
        (joined_again, [Failed(failure()), JoinRound(9)]),
    ],
    ids=["joined", "running", "failed", "succeeded", "stopping", "joined after a failure"],
)
def test_it_says_again_what_still_holds(make, said):
    machine = make()
    stage = machine.stage
    assert give(machine, welcome(9)) == said
    assert machine.stage is stage


def test_a_failure_that_it_reports_while_it_stops_is_said_again_too():
    """Who reports the root cause may lose the connection, and the call may come first."""
    machine = failed()
    give(machine, call(2))
    assert give(machine, welcome(2)) == [Failed(failure())]


@pytest.mark.parametrize("make", [running, failed, succeeded, stopping])
def test_a_world_that_is_assigned_again_changes_nothing(make):
    machine = make()
    before = repr(machine)
    assert give(machine, AssignWorld(world())) == []
    assert repr(machine) == before


def test_an_end_that_is_reported_after_the_workers_were_stopped_changes_nothing():
    machine = stopping()
    give(machine, WorkersStopped())
    before = repr(machine)
    assert give(machine, WorkerEnded(0, failure())) == []
    assert repr(machine) == before


# ---- leaving


@pytest.mark.parametrize("make", [agent, lambda: agent(welcome()), joined_again])
def test_without_workers_it_leaves_at_once(make):
    machine = make()
    assert give(machine, Dismiss(DONE)) == [Dismiss(DONE)]
    assert machine.stage is Stage.LEFT


@pytest.mark.parametrize("make", [running, failed, succeeded])
def test_it_stops_its_workers_before_it_leaves(make):
    machine = make()
    assert give(machine, Dismiss(DONE)) == [StopWorkers()]
    assert give(machine, welcome(2), call(2)) == []
    assert give(machine, WorkersStopped()) == [Dismiss(DONE)]


def test_while_it_stops_a_dismissal_changes_what_comes_after():
    machine = stopping()
    assert give(machine, Dismiss(DONE)) == []
    assert give(machine, WorkersStopped()) == [Dismiss(DONE)]


def test_the_first_dismissal_counts():
    machine = running()
    other = Outcome(exit_code=3, reason="The launcher died.")
    assert give(machine, Dismiss(DONE), Dismiss(other)) == []
    assert give(machine, WorkersStopped()) == [Dismiss(DONE)]


def test_once_it_has_left_nothing_happens():
    machine = agent(Dismiss(DONE))
    before = repr(machine)
    for event in (welcome(), call(2), AssignWorld(world()), Dismiss(DONE)):
        assert give(machine, event) == []
    assert repr(machine) == before


# ---- any order

ROUNDS = st.sampled_from([1, 2, 3, 0, -1, 2**63])
MESSAGES = st.one_of(
    st.builds(welcome, ROUNDS),
    st.builds(call, ROUNDS),
    st.builds(lambda r: AssignWorld(world(r)), ROUNDS),
    st.builds(lambda r, n: StartAgain(r, {n % 3: n // 3}), ROUNDS, st.integers(0, 11)),
    st.builds(Members, ROUNDS, st.integers(0, 3)),
)
ENDS = st.builds(
    lambda rank, bad: WorkerEnded(rank, failure(local_rank=rank) if bad else None),
    st.integers(0, 1),
    st.sampled_from([False, False, True]),
)
STOPPED = st.just(WorkersStopped())
EVENTS = st.lists(st.one_of(MESSAGES, MESSAGES, ENDS, ENDS, STOPPED), min_size=15, max_size=60)


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(EVENTS, st.sampled_from([Dismiss(DONE), None]), st.integers(0, 60))
def test_no_order_of_messages_breaks_it_or_starts_workers_beside_others(events, dismissal, at):
    """Of its own worker group only what can happen: a worker ends once, a stop is done once."""
    if dismissal is not None:
        events.insert(at, dismissal)
    machine = AgentMachine(nproc=2)
    workers = stops = leaves = 0
    for event in events:
        stopped = isinstance(event, WorkersStopped)
        impossible = isinstance(event, WorkerEnded) and event.local_rank not in machine.running
        if impossible or (stopped and not stops):
            continue
        if stopped:
            workers = stops = 0
        for command in give(machine, event):
            assert not leaves, "it did something after it had left"
            assert not (workers and isinstance(command, AssignWorld | JoinRound | Dismiss))
            workers += isinstance(command, AssignWorld)
            stops += isinstance(command, StopWorkers)
            leaves += isinstance(command, Dismiss)
        assert stops <= workers <= 1
    assert leaves == (machine.stage is Stage.LEFT)
