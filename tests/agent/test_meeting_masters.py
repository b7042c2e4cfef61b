"""What an agent tells a master that knows nothing, and whom it refuses."""

from dlrover.agent.machine.node import AgentMachine, Stage, WorkerEnded, WorkersStopped
from dlrover.rpc import messages
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.requests.membership import Members
from dlrover.spec.world import Holding, World

WORLD = World(5, 2, 1, 4, 2, 8, "10.0.0.1", 29400)


def running() -> AgentMachine:
    machine = AgentMachine(nproc=2)
    machine.handle(messages.Welcome(3, 5, 15.0, 7))
    machine.handle(messages.AssignWorld(WORLD))
    machine.validate()
    return machine


def test_an_agent_tells_its_world_and_how_far_it_is() -> None:
    machine = running()
    assert machine.holding(12) == Holding(round=5, world=WORLD, nproc=2, steps=12)
    for local_rank in range(2):
        machine.handle(WorkerEnded(local_rank, None))
    assert machine.holding(20).succeeded


def test_an_agent_tells_who_trains_and_which_processes_of_its_ranks_run() -> None:
    machine = running()
    failure = Failure(
        id="1", kind=FailureKind.SIGNAL, signal=9, node_id=3, rank=2, local_rank=0, round=5
    )
    machine.handle(WorkerEnded(0, failure))
    machine.handle(messages.StartAgain(5, {0: 1}))
    newest = Members(5, 2, {0: 0, 2: 1})
    for members in (newest, Members(5, 1, {0: 0}), Members(4, 9, {0: 0})):
        machine.handle(members)
        machine.validate()
    assert machine.holding(0).members == newest
    assert machine.holding(0).attempts == {0: 1, 1: 0}
    machine.handle(messages.CallToRound(6, "a fault"))
    machine.handle(WorkersStopped())
    machine.validate()
    assert machine.holding(0) == Holding(round=6, left=5, nproc=2)


def test_an_agent_tells_of_the_highest_round_also_after_its_workers() -> None:
    machine = running()
    machine.handle(messages.CallToRound(6, "a fault"))
    assert machine.stage is Stage.STOPPING
    assert machine.holding(0).stopping
    assert machine.holding(0).round == 6
    machine.handle(WorkersStopped())
    machine.handle(messages.Welcome(3, 1, 15.0, 8))  # by a master that knows nothing
    machine.validate()
    assert machine.holding(0) == Holding(round=6, left=5, nproc=2)
    assert machine.round == 1


def test_an_agent_refuses_a_master_that_another_has_replaced() -> None:
    machine = running()
    assert machine.epoch == 7
    assert machine.refuses(messages.Welcome(3, 6, 15.0, 6))
    assert machine.refuses(messages.Welcome(3, 6, 15.0))
    assert not machine.refuses(messages.Welcome(3, 6, 15.0, 7))
    assert not machine.refuses(messages.CallToRound(6, "a fault"))
    machine.handle(messages.Welcome(3, 6, 15.0, 9))
    assert machine.refuses(messages.Welcome(3, 6, 15.0, 7))
