"""What a master without a journal makes of what its agents tell."""

from __future__ import annotations

import msgspec
import pytest

from dlrover.master.machine import inputs
from dlrover.master.machine.adoption import Adoption
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Phase
from dlrover.master.machine.waiting import waiting_for
from dlrover.rpc.messages import Hello, Succeeded, Welcome
from dlrover.spec import events
from dlrover.spec.node import FoundNode, LaunchNode, NodeStatus
from dlrover.spec.world import Holding, World
from tests.support.drivers import JobDriver

GRACE = 15.0


def holding(node_rank: int, count: int = 3, *, round_: int = 5, **facts: object) -> Holding:
    """What a node with two workers holds of a world."""
    world = World(round_, 2, node_rank, count, 2 * node_rank, 2 * count, "host0", 29400)
    return msgspec.structs.replace(Holding(round=round_, world=world, nproc=2, steps=7), **facts)


def tell(driver: JobDriver, node: int, held: Holding) -> list[inputs.Command]:
    runs = held.world.round if held.world is not None else 0
    return driver.give(Hello(f"agent {node}", node, -1, f"host{node}", runs, held))


@pytest.fixture
def driver() -> JobDriver:
    return JobDriver(min_nodes=2, max_nodes=3)


def test_a_round_is_adopted_when_all_its_nodes_have_told_of_it(driver: JobDriver) -> None:
    for node in (2, 0):
        tell(driver, node, holding(node))
        assert driver.machine.state.phase is Phase.WAITING
    driver.now = 4.0
    said = waiting_for(driver.machine, driver.now)
    assert said.endswith("4 s of 15 s; 2 of 3 nodes of round 5 reported it")
    assert tell(driver, 1, holding(1)) == [inputs.Greet("agent 1", Welcome(1, 1, 15.0))]
    machine = driver.machine
    assert machine.state.phase is Phase.RUNNING
    assert (machine.rendezvous.round, machine.rendezvous.members) == (5, (0, 1, 2))
    assert (machine.progress.steps, machine.restarts.count, machine.fleet.next_id) == (7, 2, 3)
    assert driver.emitted(events.MasterAdopted) == [events.MasterAdopted(5, 3)]


@pytest.mark.parametrize(
    "odd",
    [
        {"stopping": True},
        {"nproc": 1},
        {"world": World(5, 2, 1, 3, 2, 6, "host0", 1)},
        {"world": World(5, 2, 0, 3, 0, 6, "host0", 29400)},
        {"world": None},
    ],
    ids=["stopping", "too few workers", "another store", "a rank twice", "nothing"],
)
def test_a_world_that_is_not_whole_is_not_adopted(driver: JobDriver, odd: dict) -> None:
    for node in range(3):
        tell(driver, node, holding(node, **(odd if node == 1 else {})))
    driver.give(inputs.DeadlinePassed(), at=GRACE)
    assert not driver.emitted(events.MasterAdopted)
    assert driver.machine.rendezvous.collecting
    assert driver.machine.rendezvous.round == 6
    assert driver.machine.restarts.count == 2


def test_nodes_that_are_missing_are_waited_for_and_the_others_called(driver: JobDriver) -> None:
    tell(driver, 0, holding(0))
    assert driver.machine.deadline() == GRACE
    commands = driver.give(inputs.DeadlinePassed(), at=GRACE)
    (call,) = [c for c in commands if isinstance(c, inputs.Say)]
    assert (call.node_id, call.message.round) == (0, 6)


def test_a_smaller_world_is_adopted_when_nobody_else_has_spoken(driver: JobDriver) -> None:
    for node in range(2):
        tell(driver, node, holding(node, 2))
    assert driver.machine.adoption.pending
    driver.give(inputs.DeadlinePassed(), at=GRACE)
    assert driver.emitted(events.MasterAdopted) == [events.MasterAdopted(5, 2)]


def test_the_new_round_is_above_any_that_was_told(driver: JobDriver) -> None:
    tell(driver, 0, holding(0))
    tell(driver, 1, Holding(round=9, nproc=2))
    driver.give(inputs.DeadlinePassed(), at=GRACE)
    assert driver.machine.rendezvous.round == 10


def test_a_world_larger_than_the_job_allows_is_not_adopted(driver: JobDriver) -> None:
    for node in range(4):
        tell(driver, node, holding(node, 4))
    assert not driver.emitted(events.MasterAdopted)
    assert driver.machine.rendezvous.round == 6


def test_nodes_outside_of_the_adopted_world_are_called(driver: JobDriver) -> None:
    tell(driver, 7, holding(0, 1, round_=3))
    assert driver.machine.adoption.pending  # an old world of one node
    commands = [c for node in range(3) for c in tell(driver, node, holding(node))]
    calls = [c for c in commands if isinstance(c, inputs.Say)]
    assert [(c.node_id, c.message.round) for c in calls] == [(7, 6)]
    assert driver.status(7) is NodeStatus.READY


def test_nodes_that_have_succeeded_end_the_job(driver: JobDriver) -> None:
    for node in range(2):
        tell(driver, node, holding(node, succeeded=True))
    tell(driver, 2, holding(2))
    driver.give(inputs.Reported(2, Succeeded(5)))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome.exit_code == 0


def test_an_agent_without_a_past_opens_no_adoption(driver: JobDriver) -> None:
    tell(driver, -1, Holding())
    tell(driver, -1, Holding(round=1))  # it was told of this master's own round
    assert driver.machine.rendezvous.collecting
    assert not driver.machine.adoption.pending


def test_nodes_that_the_platform_runs_are_not_started_again() -> None:
    driver = JobDriver(3, 3, managed_nodes=3)
    job = driver.machine.job
    found = tuple(FoundNode(i, i, f"process {i}", 3.0, 1.5) for i in (0, 2))
    driver.machine, driver.ledger = JobMachine(), Ledger()  # a master that knows nothing
    driver.events.clear()
    commands = driver.give(inputs.Submitted(job, "", found, 12))
    assert commands == [LaunchNode(3, 1)]
    assert not driver.emitted(events.JobSubmitted)
    tell(driver, 0, Holding(round=4, nproc=2))
    assert driver.machine.adoption.pending
    tell(driver, 2, Holding(round=4, nproc=2))  # nobody else can hold a world
    assert driver.machine.rendezvous.round == 5
    assert driver.machine.nodes[2].handle == "process 2"
    lost = driver.give(inputs.NodeExited(2, "it was killed"), at=20.0)
    assert LaunchNode(4, 2, (), 3.0, 1.5) in lost, "what replaces it has its size"


def test_a_node_that_is_gone_is_forgotten() -> None:
    adoption = Adoption()
    adoption.begin([0, 1], 0.0, GRACE)
    adoption.hear(0, holding(0))
    adoption.hear(0, holding(0))
    adoption.validate()
    adoption.forget(0)
    adoption.validate()
    assert not adoption.due(1.0, 3)
    adoption.forget(1)
    assert adoption.due(1.0, 3)
    assert adoption.members() == {}
