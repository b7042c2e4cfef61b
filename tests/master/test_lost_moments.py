"""A master whose journal lacks the last moments: what nodes know of later rounds counts, and no number comes twice."""

from typing import Any

import msgspec
import pytest

from dlrover.agent.machine.node import AgentMachine, WorkersStopped
from dlrover.master.machine import inputs
from dlrover.rpc.messages import AssignWorld, CallToRound, Dismiss, Hello, StandBy, Welcome
from dlrover.spec.check import CheckReport
from dlrover.spec.failure import FailureKind
from dlrover.spec.node import FIRST_SPARE, FoundNode
from dlrover.spec.outcome import Outcome
from dlrover.spec.world import Holding, World
from tests.support.drivers import JobDriver

KILLED = {"kind": FailureKind.SIGNAL, "signal": 9}
LOST = "the master has lost a round"


def connect(job: JobDriver, node: int, world: World | None = None, **facts: Any) -> list[Any]:
    """Connect a node again; return what it is told beside its welcome."""
    running = world.round if world is not None else 0
    held = Holding(**{"round": running, "world": world, "nproc": 2} | facts)
    return job.give(Hello(f"agent {node}", node, -1, f"host{node}", running, held))[1:]


def calls(round_: int, *nodes: int, reason: str = LOST) -> list[inputs.Command]:
    return [inputs.Say(node, CallToRound(round_, reason)) for node in nodes]


def rounds(job: JobDriver) -> tuple[int, bool]:
    return job.machine.rendezvous.round, job.machine.rendezvous.collecting


def test_a_node_that_runs_a_round_beyond_the_journal_makes_everybody_start_anew():
    job = JobDriver.running(2)
    assert job.connect(0, runs=2)[1:] == calls(3, 0, 1)
    assert [c.message.world.round for c in job.join(0, 1)] == [3, 3]
    assert job.machine.restarts.count == 0


@pytest.mark.parametrize("survive", [False, True])
def test_a_node_that_has_left_its_round_makes_everybody_start_anew(survive):
    """It was called to a round that the journal lacks, and must not enter an earlier one again."""
    for known, left, opens in ((2, 1, 2), (4, 3, 5)):
        job = JobDriver.running(2, survive=survive)
        assert connect(job, 0, round=known, left=left) == calls(opens, 0, 1)
    job = JobDriver.running(2, survive=survive)
    world = job.machine.rounds.worlds[0]
    assert connect(job, 0, world, round=2, stopping=True) == calls(2, 0, 1)


def test_a_node_that_has_not_yet_heard_of_its_world_is_assigned_to_it():
    job = JobDriver.running(2)
    (said,) = connect(job, 0, round=2)
    assert said.message.world == job.machine.rounds.worlds[0]
    assert rounds(job) == (1, False)


def test_a_world_with_the_same_number_that_the_journal_lacks_is_another_one():
    job = JobDriver.running(2)
    world = job.machine.rounds.worlds[0]
    assert rounds(job) == (1, False)
    connect(job, 0, world.as_attempt(3))
    assert rounds(job) == (1, False)
    assert connect(job, 0, msgspec.structs.replace(world, salt="other")) == calls(2, 0, 1)


def test_a_round_that_collects_gets_a_number_that_no_node_knows():
    job = JobDriver.running(2)
    job.fail(0, KILLED)
    job.join(0)
    assert rounds(job) == (2, True)
    world = msgspec.structs.replace(job.machine.rounds.worlds[1], round=2)
    assert connect(job, 1, world) == calls(3, 1)
    connect(job, 1, round=4)
    assert [c.message.world.round for c in job.join(1)] == [5, 5]


def test_a_node_outside_the_world_takes_the_next_rounds_number_along():
    job = JobDriver.running(2)
    assert connect(job, 5, round=2) == []
    assert (rounds(job), job.machine.rendezvous.next_round) == ((1, False), 2)
    assert connect(job, 5, round=6) == []
    assert (rounds(job), job.machine.rendezvous.next_round) == ((1, False), 7)


def test_the_next_rounds_number_is_above_all_that_nodes_know_when_a_round_is_adopted():
    job = spares(0, 1, FIRST_SPARE)
    connect(job, 2, round=4)
    connect(job, 0, world_of(0))
    connect(job, 1, world_of(1))
    assert (rounds(job), job.machine.rendezvous.next_round) == ((1, False), 5)


def spares(*ranks: int) -> JobDriver:
    """A job of two nodes and two spares whose master has lost its journal, with nodes launched for these ranks."""
    job = JobDriver(2, 2, managed_nodes=2, spares=2, survive=True)
    found = tuple(FoundNode(i, rank, f"process {i}") for i, rank in enumerate(ranks))
    job.give(inputs.Submitted(job.machine.job, "/jobs/1", found, earlier_events=9))
    return job


def world_of(place: int) -> World:
    return World(1, 0, place, 2, 2 * place, 4, "host0", 29400)


def test_a_spare_in_the_world_has_a_place_that_another_node_was_started_for():
    job = spares(0, 1, FIRST_SPARE, FIRST_SPARE + 1)
    job.join(1)
    connect(job, 1)
    job.join(1)
    connect(job, 0, world_of(0))
    assert inputs.Say(1, StandBy()) in connect(job, 2, world_of(1))
    assert job.machine.rendezvous.members == (0, 2)
    assert [job.machine.nodes[i].node_rank for i in (1, 2)] == [FIRST_SPARE, 1]
    assert job.machine.spares.offers.keys() == {1}


def test_a_spare_whose_world_the_journal_lacks_stops_its_workers():
    job = spares(0, 1, FIRST_SPARE)
    connect(job, 0, world_of(0))
    connect(job, 1, world_of(1))
    assert connect(job, 2, world_of(1)) == calls(2, 2, reason="the world went on without this node")


def test_a_node_that_takes_a_place_a_second_time_has_other_attempts():
    job = JobDriver.running(2, 2, 2, survive=True)
    world = job.machine.rounds.worlds[1].as_attempt(3)
    job.give(inputs.NodeSilent(1, 60.0))
    connect(job, 2, world, round=2, attempts={0: 3, 1: 3})
    job.join(2)
    assert job.machine.rounds.worlds[2].attempt == 4


def test_a_check_ends_when_a_running_world_is_reported():
    job = JobDriver(2, 2, node_check=True)
    for node in range(2):
        connect(job, node)
    orders = job.join(0, 1)
    assert job.machine.checks.run is not None
    connect(job, 0, world_of(0))
    assert job.machine.adoption.pending
    for order in orders:
        job.give(inputs.Reported(order.node_id, CheckReport(check=1, round=1, results=())))
    connect(job, 1, world_of(1))
    assert (rounds(job), job.machine.rounds.worlds[1]) == ((1, False), world_of(1))


# ---- what is no lost round


def agent_of(job: JobDriver, node: int) -> AgentMachine:
    """Return an agent that runs its workers of the job's world."""
    agent = AgentMachine(nproc=2)
    agent.handle(Welcome(node, 1, 5.0))
    agent.handle(AssignWorld(job.machine.rounds.worlds[node]))
    return agent


def hello(agent: AgentMachine, node: int) -> Hello:
    return Hello(
        f"agent {node}", agent.node_id, -1, f"host{node}", agent.running_round, agent.holding(0)
    )


def test_a_hello_that_comes_a_round_late_opens_none():
    job = JobDriver.running(2, 2, 2)
    late = hello(agent_of(job, 0), 0)
    job.fail(1, KILLED)
    job.join(0, 1)
    (again,) = job.give(late)[1:]
    assert again.message.world.round == 2
    assert rounds(job) == (2, False)


def test_a_node_that_leaves_by_itself_and_connects_meanwhile_opens_none():
    job = JobDriver.running(2, 2, 2, survive=True)
    agent = agent_of(job, 1)
    agent.handle(Dismiss(Outcome(exit_code=143, reason="SIGTERM")))
    assert agent.holding(0).stopping
    job.give(hello(agent, 1))
    assert rounds(job) == (1, False)


def test_a_node_that_returns_to_its_round_may_miss_its_world_once():
    job = JobDriver.running(2, 2, 2, survive=True)
    agent = agent_of(job, 1)
    job.give(inputs.NodeSilent(1, 60.0))
    for command in job.give(hello(agent, 1)):
        agent.handle(command.message)
    agent.handle(WorkersStopped())
    assert (agent.left, agent.left_attempt) == (1, 0)
    new = agent.node_id
    job.join(new)
    job.give(inputs.NodeDisconnected(new))
    again = job.give(hello(agent, 1))[1:]
    assert any(isinstance(command.message, AssignWorld) for command in again)
    assert rounds(job) == (1, False)


def test_a_round_far_beyond_the_journal_is_no_round():
    job = JobDriver.running(2)
    connect(job, 0, job.machine.rounds.worlds[0], round=2**53)
    job.fail(1, KILLED)
    assert rounds(job) == (2, True)


def test_the_round_before_is_the_completed_one_whatever_the_next_one_is_called():
    job = JobDriver.running(2)
    connect(job, 0, job.machine.rounds.worlds[0], round=6)
    job.fail(1, KILLED)
    assert rounds(job) == (7, True)
    assert job.machine.rendezvous.last_round == 1
