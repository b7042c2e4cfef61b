"""A job of instances: no common world; each node starts, fails and returns alone, and the job ends with the last."""

from typing import Any

from hypothesis import given, settings, strategies as st

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.state import Phase
from dlrover.master.views.status import status_of
from dlrover.rpc.messages import AssignWorld, CallToRound, Dismiss, Join, Succeeded
from dlrover.spec.failure import FailureKind
from dlrover.spec.node import LaunchNode, NodeStatus
from dlrover.spec.world import Offer
from tests.support.drivers import JobDriver

KILLED = {"kind": FailureKind.SIGNAL, "signal": 9}
BUG = {"kind": FailureKind.EXCEPTION, "exception": "ValueError", "message": "x"}
COUNT = 3


def submitted(**spec: Any) -> JobDriver:
    return JobDriver(COUNT, COUNT, managed_nodes=COUNT, instances="rollout", **spec)


def running(**spec: Any) -> JobDriver:
    driver = submitted(**spec)
    for node in range(COUNT):
        driver.give(inputs.NodePlaced(node, f"process {node}"))
        driver.connect(node, claims=node)
        join(driver, node)
    return driver


def join(driver: JobDriver, node: int) -> list[inputs.Command]:
    number = driver.machine.instances.next_round(driver.machine.nodes[node])
    return driver.give(inputs.Reported(node, Join(number, Offer(1, f"host{node}", 29400))))


def fail(driver: JobDriver, node: int, how: dict[str, Any], at: float) -> list[inputs.Command]:
    world = driver.machine.instances.worlds[node]
    return driver.fail(node, how, at=at, round=world.round, rank=node)


def test_each_starts_at_once_with_the_name_of_its_role() -> None:
    driver = submitted()
    assert driver.machine.deadline() is None, "no round waits for nodes"
    driver.give(inputs.NodePlaced(0, "process 0"))
    driver.connect(0, claims=0)
    (assigned,) = [c for c in join(driver, 0) if isinstance(c, inputs.Say)]
    world = assigned.message.world
    assert (world.instance_role, world.index, world.instances, world.world_size) == (
        "rollout",
        0,
        3,
        1,
    )
    assert driver.machine.state.phase is Phase.RUNNING
    assert [node.role for node in status_of(driver.machine, 1.0, {}).nodes] == ["rollout"] * COUNT


def test_one_that_fails_restarts_alone_and_within_its_own_budget() -> None:
    driver = running(max_restarts=1)
    for node in (1, 2):
        commands = fail(driver, node, BUG, 100.0 + node)
        assert [(c.node_id, type(c.message)) for c in commands] == [(node, CallToRound)]
        assert [type(c.message) for c in join(driver, node)] == [AssignWorld]
    fail(driver, 1, BUG | {"message": "y"}, 300.0)
    assert driver.machine.outcome.exit_code == ExitCode.USER_CODE


def test_a_lost_node_is_replaced_and_the_others_do_not_notice() -> None:
    driver = running()
    commands = driver.give(inputs.NodeExited(1, "it was killed"), at=100.0)
    assert [c for c in commands if isinstance(c, LaunchNode)] == [LaunchNode(3, 1)]
    assert not [c for c in commands if isinstance(c, inputs.Say)]


def test_the_job_ends_when_all_have_succeeded() -> None:
    driver = running()
    for node in (0, 1):
        driver.give(inputs.Reported(node, Succeeded(1)))
        assert driver.machine.outcome is None
    driver.give(inputs.NodeExited(0, "it ended"))
    commands = driver.give(inputs.Reported(2, Succeeded(1)))
    assert driver.machine.outcome.exit_code == ExitCode.SUCCESS
    assert {c.node_id for c in commands if isinstance(c, inputs.Say)} == {1, 2}
    assert all(isinstance(c.message, Dismiss) for c in commands if isinstance(c, inputs.Say))


def test_more_instances_start_and_leave_without_a_round() -> None:
    driver = running()
    more = driver.give(inputs.ScaleRequested(4, "load", "user", "worker"))
    assert [c for c in more if isinstance(c, LaunchNode)] == [LaunchNode(3, 3)]
    driver.give(inputs.NodePlaced(3, "process 3"))
    driver.connect(3, claims=3)
    join(driver, 3)
    fewer = driver.give(inputs.ScaleRequested(3, "load", "user", "worker"))
    assert [c.node_id for c in fewer if isinstance(c, inputs.Say)] == [3]
    driver.give(inputs.NodeExited(3, "it ended"))
    assert driver.machine.nodes[3].status is NodeStatus.RELEASED
    assert driver.machine.rendezvous.round == 0


def test_a_new_master_finds_the_instances_at_work() -> None:
    driver = running()
    driver.give(inputs.MasterStarted(10), at=100.0)
    for node in range(COUNT):
        driver.connect(node, runs=1)
    fail(driver, 2, KILLED, 200.0)
    assert [type(c.message) for c in join(driver, 2)] == [AssignWorld]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, COUNT - 1), st.sampled_from(["kill", "lose", "end", "join"])),
        max_size=25,
    )
)
def test_any_order_of_faults_and_ends_keeps_the_invariants(steps: list[tuple[int, str]]) -> None:
    driver = running()
    for rank, what in steps:
        nodes = [
            n for n in driver.machine.nodes.values() if n.node_rank == rank and not n.status.final
        ]
        if driver.machine.outcome is not None or not nodes:
            break
        node = nodes[-1]
        runs = node.id in driver.machine.instances.worlds and node.status is NodeStatus.RUNNING
        if what == "kill" and runs:
            fail(driver, node.id, KILLED, driver.now + 70.0)
        elif what == "end" and runs:
            round_ = driver.machine.instances.worlds[node.id].round
            driver.give(inputs.Reported(node.id, Succeeded(round_)))
        elif what == "lose":
            driver.give(inputs.NodeExited(node.id, "it was killed"), at=driver.now + 70.0)
        elif what == "join" and node.status in (NodeStatus.PENDING, NodeStatus.READY):
            if node.status is NodeStatus.PENDING:
                driver.give(inputs.NodePlaced(node.id, f"process {node.id}"))
                driver.connect(node.id, claims=node.id)
            join(driver, node.id)
    ranks = {n.node_rank for n in driver.machine.nodes.values() if n.status is NodeStatus.SUCCEEDED}
    assert (len(ranks) == COUNT) == (
        driver.machine.outcome is not None and driver.machine.outcome.exit_code == 0
    )
