"""Instances: servers that belong to no world. Each starts, fails and returns by itself; the workers go on."""

from typing import Any

import pytest

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.state import Phase
from dlrover.master.views.status import status_of
from dlrover.rpc.messages import AssignWorld, CallToRound, Dismiss, Hello, Join, Succeeded
from dlrover.spec import events
from dlrover.spec.failure import FailureKind
from dlrover.spec.node import FIRST_SERVER, LaunchNode, NodeStatus, Size
from dlrover.spec.world import Holding, Offer
from tests.support.drivers import JobDriver

KILLED = {"kind": FailureKind.SIGNAL, "signal": 9}
TYPO = {"kind": FailureKind.EXCEPTION, "exception": "SyntaxError", "message": "invalid syntax"}
BUG = {"kind": FailureKind.EXCEPTION, "exception": "ValueError", "message": "x"}
WORKERS = 2
SERVERS = (2, 3)
"""Nodes that serve at first; nodes 0 and 1 work."""


def submitted(**spec: Any) -> JobDriver:
    bounds = {"servers": 2, "min_servers": 1, "max_servers": 2, "server_failover": "instance"}
    return JobDriver(1, WORKERS, managed_nodes=WORKERS, **bounds | spec)


def running(**spec: Any) -> JobDriver:
    driver = submitted(**spec)
    for node in range(WORKERS + 2):
        come(driver, node)
    driver.join(*range(WORKERS), at=10.0)
    for node in SERVERS:
        join(driver, node)
    assert driver.machine.state.phase is Phase.RUNNING
    return driver


def come(driver: JobDriver, node: int) -> None:
    driver.give(inputs.NodePlaced(node, f"process {node}"))
    driver.connect(node, claims=node)


def join(driver: JobDriver, node: int, round_: int | None = None) -> list[inputs.Command]:
    machine = driver.machine
    number = machine.instances.next_round(machine.nodes[node]) if round_ is None else round_
    offer = Offer(1, f"host{node}", 29400 + node)
    return driver.give(inputs.Reported(node, Join(number, offer)))


def said(commands: list[inputs.Command], kind: type) -> list[int]:
    return [c.node_id for c in commands if isinstance(getattr(c, "message", None), kind)]


def launched(commands: list[inputs.Command]) -> list[LaunchNode]:
    return [c for c in commands if isinstance(c, LaunchNode)]


def world(driver: JobDriver, node: int):
    return driver.machine.instances.worlds[node]


def server(driver: JobDriver, index: int) -> int:
    """Return the node of a server; it connects if it is new."""
    nodes = driver.machine.nodes.values()
    node = max(n.id for n in nodes if n.node_rank == FIRST_SERVER + index)
    if driver.status(node) is NodeStatus.PENDING:
        come(driver, node)
    return node


def fail(driver: JobDriver, node: int, details: dict[str, Any], at: float) -> list[inputs.Command]:
    return driver.fail(node, details, at=at, id=f"{node} at {at}", round=world(driver, node).round)


def undisturbed(driver: JobDriver) -> bool:
    """Return whether the workers are still in their first round."""
    rdzv = driver.machine.rendezvous
    return (rdzv.round, rdzv.collecting, driver.machine.restarts.count) == (1, False, 0)


def test_the_world_has_the_workers_only_and_each_server_has_its_own() -> None:
    driver = running()
    assert driver.machine.rendezvous.size == Size(WORKERS)
    assert driver.machine.rounds.worlds[0].world_size == 2 * WORKERS
    places = [
        (w.index, w.instances, w.world_size, w.round) for w in (world(driver, n) for n in SERVERS)
    ]
    assert places == [(0, 2, 1, 1), (1, 2, 1, 1)]
    assert (
        driver.emitted(events.InstanceStarted)[0].sentence() == "Instance 0 of ps starts on node 2."
    )
    assert status_of(driver.machine, driver.now, {}).servers == 2


def test_workers_do_not_wait_for_a_server_nor_a_server_for_them() -> None:
    driver = submitted()
    come(driver, 2)
    assert said(join(driver, 2), AssignWorld) == [2], "no worker is there yet"
    come(driver, 0)
    come(driver, 1)
    driver.join(0, 1, at=10.0)
    assert driver.machine.state.phase is Phase.RUNNING, "server 1 is not there yet"


def test_a_server_that_fails_starts_again_alone_on_its_node() -> None:
    driver = running()
    commands = fail(driver, 3, KILLED, 100.0)
    assert commands == [inputs.Say(3, CallToRound(2, commands[0].message.reason))]
    assert said(join(driver, 3), AssignWorld) == [3]
    assert (world(driver, 3).round, world(driver, 3).restart_count) == (2, 1)
    assert undisturbed(driver)
    (restart,) = driver.emitted(events.InstanceRestarts)
    assert restart.sentence().startswith("Instance 1 of ps restarts (restart 1): ")


def test_a_failure_of_an_earlier_start_or_a_second_one_changes_nothing() -> None:
    driver = running()
    fail(driver, 3, KILLED, 100.0)
    machine = driver.machine
    late = driver.fail(3, KILLED, at=100.1, round=1)
    assert late == []
    join(driver, 3)
    assert driver.fail(3, KILLED, at=100.2, round=1) == []
    assert machine.recovery.admitted(driver.emitted(events.WorkerFailed)[0].failure) is None
    assert len(driver.emitted(events.InstanceRestarts)) == 1


def test_a_lost_server_is_replaced_and_its_starts_are_counted_on() -> None:
    driver = running()
    commands = driver.give(inputs.NodeExited(3, "it was killed"), at=100.0)
    assert launched(commands) == [LaunchNode(4, FIRST_SERVER + 1)]
    come(driver, 4)
    assert said(join(driver, 4), AssignWorld) == [4]
    assert (world(driver, 4).index, world(driver, 4).round) == (1, 2)
    assert 3 not in driver.machine.instances.worlds
    assert undisturbed(driver)


def test_a_restart_of_the_workers_leaves_the_servers_alone() -> None:
    driver = running()
    driver.give(inputs.Progressed(1, 5), at=20.0)
    commands = driver.fail(0, KILLED, at=100.0)
    assert said(commands, CallToRound) == [0, 1]
    driver.join(0, 1)
    assert driver.machine.rendezvous.round == 2
    assert driver.status(2) is NodeStatus.RUNNING


def test_a_server_that_cannot_work_ends_the_job() -> None:
    for details, code in ((TYPO, ExitCode.USER_CODE), (BUG, ExitCode.USER_CODE)):
        driver = running()
        fail(driver, 2, details, 100.0)
        assert driver.machine.outcome.exit_code == code


@pytest.mark.parametrize(("seconds", "ends"), [(1.0, True), (600.0, False)])
def test_a_server_that_always_dies_at_once_ends_the_job(seconds: float, ends: bool) -> None:
    driver = running()
    for _ in range(8):
        if driver.machine.outcome is None:
            fail(driver, server(driver, 0), KILLED, driver.now + seconds)
        if driver.machine.outcome is None:
            join(driver, server(driver, 0))
    assert (driver.machine.outcome is not None) is ends


def test_the_restarts_of_one_server_cost_another_nothing() -> None:
    driver = running(max_restarts=1)
    fail(driver, 2, BUG, 100.0)
    join(driver, 2)
    fail(driver, 3, BUG, 200.0)
    join(driver, 3)
    assert driver.machine.outcome is None
    fail(driver, 3, BUG | {"message": "y"}, 300.0)
    assert driver.machine.outcome.exit_code == ExitCode.USER_CODE


def test_servers_are_added_and_leave_without_a_round() -> None:
    driver = running()
    more = driver.give(inputs.ScaleRequested(3, "load", "user", "ps"))
    assert launched(more) == [LaunchNode(4, FIRST_SERVER + 2)]
    come(driver, 4)
    join(driver, 4)
    assert (world(driver, 4).index, world(driver, 4).instances) == (2, 3)
    fewer = driver.give(inputs.ScaleRequested(1, "load", "user", "ps"))
    assert said(fewer, Dismiss) == [3, 4]
    driver.give(inputs.NodeExited(3, "it ended"), inputs.NodeExited(4, "it ended"))
    assert driver.status(3) is driver.status(4) is NodeStatus.RELEASED
    assert undisturbed(driver)


def test_a_hot_server_moves_without_a_round() -> None:
    driver = running()
    move = inputs.MigrationRequested(2, 2.0, 1.0, "it is hot")
    assert launched(driver.give(move)) == [LaunchNode(4, FIRST_SERVER, cpu_factor=2.0)]
    come(driver, 4)
    commands = join(driver, 4)
    assert said(commands, AssignWorld) == [4]
    assert said(commands, Dismiss) == [2]
    driver.give(inputs.NodeExited(2, "it ended"))
    assert driver.status(2) is NodeStatus.RELEASED
    assert undisturbed(driver)


def test_a_server_that_comes_back_goes_on_and_one_that_forgot_starts_again() -> None:
    driver = running()
    driver.give(inputs.NodeDisconnected(2))
    assert said(driver.connect(2, runs=1), CallToRound) == []
    driver.give(inputs.NodeDisconnected(2))
    assert said(driver.connect(2, runs=0), CallToRound) == [], "its agent asks to join by itself"
    assert said(join(driver, 2, round_=1), CallToRound) == [2]
    assert said(join(driver, 2), AssignWorld) == [2]


def test_a_new_master_with_its_journal_finds_the_servers_at_work() -> None:
    driver = running()
    driver.give(inputs.MasterStarted(10), at=100.0)
    for node in range(4):
        assert said(driver.connect(node, runs=1), CallToRound) == []
    assert driver.status(2) is NodeStatus.RUNNING
    fail(driver, 2, KILLED, 200.0)
    assert said(join(driver, 2), AssignWorld) == [2]


def test_a_server_that_a_new_master_does_not_find_is_replaced() -> None:
    driver = running()
    driver.give(inputs.MasterStarted(10), at=100.0)
    for node in (0, 1, 2):
        driver.connect(node, runs=1)
    driver.now = driver.machine.deadline()
    assert [n.node_rank for n in launched(driver.give(inputs.DeadlinePassed()))] == [
        FIRST_SERVER + 1
    ]
    assert undisturbed(driver)


def test_a_master_without_a_journal_adopts_servers_one_by_one() -> None:
    before = running()
    held = before.machine.instances.worlds[2]
    driver = submitted()
    driver.give(inputs.NodePlaced(2, "process 2"))
    hello = Hello("agent 2", 2, -1, "host2", 1, Holding(round=1, world=held))
    assert said(driver.give(hello), CallToRound) == []
    assert driver.status(2) is NodeStatus.RUNNING
    fail(driver, 2, KILLED, 100.0)
    join(driver, 2)
    assert world(driver, 2).round == 2


def test_the_job_ends_with_its_workers_and_dismisses_the_servers() -> None:
    driver = running()
    commands = driver.give(*(inputs.Reported(node, Succeeded(1)) for node in (0, 1)))
    assert driver.machine.outcome.exit_code == ExitCode.SUCCESS
    assert sorted(said(commands, Dismiss)) == [0, 1, 2, 3]


def test_a_server_whose_program_ends_well_has_succeeded_and_is_not_started_again() -> None:
    driver = running()
    driver.give(inputs.Reported(2, Succeeded(1)))
    assert driver.status(2) is NodeStatus.SUCCEEDED
    driver.fail(0, KILLED, at=100.0)
    assert driver.status(2) is NodeStatus.SUCCEEDED


def test_goodput_counts_the_workers_only() -> None:
    driver = running()
    driver.give(inputs.Progressed(1, 5), at=110.0)
    fail(driver, 2, KILLED, 150.0)
    wall = driver.ledger.wall(driver.ledger._now)
    assert wall <= WORKERS * 150 * 1_000_000


@pytest.mark.parametrize("times", [1, 2])
def test_an_input_that_comes_twice_changes_nothing_more(times: int) -> None:
    driver = running()
    for _ in range(times):
        driver.give(inputs.NodeExited(3, "it was killed"), at=100.0)
    assert [n.id for n in driver.machine.nodes.values() if n.node_rank == FIRST_SERVER + 1] == [
        3,
        4,
    ]


@pytest.mark.parametrize("lost", [False, True], ids=["its process", "its node"])
def test_a_server_that_runs_out_of_memory_comes_back_with_more(lost: bool) -> None:
    driver = running(grows_memory=True, most_memory_factor=3.0)
    for factor in (2.0, 3.0):
        node = server(driver, 1)
        join(driver, node)
        driver.now += 100.0
        if lost:
            reason = "its container main ran out of memory (OOMKilled)"
            commands = driver.give(inputs.NodeExited(node, reason))
        else:
            commands = fail(driver, node, KILLED | {"oom_killed": True}, driver.now)
        (made,) = launched(commands)
        assert (made.node_rank, made.memory_factor) == (FIRST_SERVER + 1, factor)
    assert undisturbed(driver)


def test_a_server_without_more_memory_to_give_restarts_as_it_was() -> None:
    driver = running()
    commands = fail(driver, 3, KILLED | {"oom_killed": True}, 100.0)
    assert said(commands, CallToRound) == [3]
    assert not launched(commands)
