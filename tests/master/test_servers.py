"""Parameter servers: nodes of role ps beside the workers, in one world with them."""

import pytest

from dlrover.errors import ExitCode
from dlrover.master import platformside
from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.rendezvous import Rendezvous
from dlrover.master.machine.state import Phase
from dlrover.master.machine.waiting import waiting_for
from dlrover.rpc import messages
from dlrover.rpc.messages import Succeeded
from dlrover.spec import events
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import JobSpec
from dlrover.spec.node import (
    FIRST_SERVER,
    FoundNode,
    LaunchNode,
    NodeStatus,
    Size,
    index_in_role,
    role_of,
)
from dlrover.spec.world import Offer
from tests.support.drivers import JobDriver


def asked(nodes: int, source: str = "user", role: str = "ps") -> inputs.ScaleRequested:
    return inputs.ScaleRequested(nodes, "it was asked for", source, role)


def of(commands: list[inputs.Command], kind: type) -> list[inputs.Command]:
    """Return the commands, or the orders to nodes, of one kind."""
    return [c for c in commands if isinstance(getattr(c, "message", c), kind)]


def ranks(commands: list[inputs.Command]) -> list[int]:
    return [command.node_rank for command in of(commands, LaunchNode)]


def submitted(workers: int = 2, servers: int = 2, **spec: object) -> JobDriver:
    """A job of so many workers' nodes and servers, which the platform is asked for."""
    bounds = {"min_servers": servers, "max_servers": servers, "servers": servers} | spec
    least = bounds.pop("min_nodes", workers)
    most = bounds.pop("max_nodes", workers)
    return JobDriver(least, most, managed_nodes=workers, **bounds)


def running(workers: int = 2, servers: int = 2, **spec: object) -> JobDriver:
    """The same, in its first world. Nodes 0, 1, ... are workers, those behind them are servers."""
    driver = submitted(workers, servers, **spec)
    nodes = range(workers + servers)
    for node in nodes:
        come(driver, node)
    driver.join(*nodes, at=10.0)
    assert driver.machine.state.phase is Phase.RUNNING
    return driver


def come(driver: JobDriver, *nodes: int) -> None:
    for node in nodes:
        driver.give(inputs.NodePlaced(node, f"process {node}"))
        driver.connect(node, claims=node)


# ---- roles


@pytest.mark.parametrize(
    ("node_rank", "role", "index"),
    [(0, "worker", 0), (99_999, "worker", 99_999), (FIRST_SERVER, "ps", 0), (FIRST_SERVER + 7, "ps", 7)],
)  # fmt: skip
def test_a_wanted_rank_tells_the_role(node_rank: int, role: str, index: int) -> None:
    assert (role_of(node_rank), index_in_role(node_rank)) == (role, index)


# ---- worlds


def test_workers_come_first_whoever_joined_first() -> None:
    rdzv = Rendezvous(
        JobSpec(name="job", min_nodes=2, max_nodes=2, servers=1, min_servers=1, max_servers=1)
    )
    rdzv.servers.add(0)
    rdzv.open((), fixed=False, now=0.0)
    for node, nproc in ((0, 1), (1, 4), (2, 4)):
        assert not rdzv.ready(1.0)
        rdzv.join(node, Offer(nproc, f"host{node}", 1), 0.0)
    assert rdzv.ready(1.0)
    worlds = rdzv.complete({0: FIRST_SERVER, 1: -1, 2: 0}, 0)
    rdzv.validate()
    assert rdzv.members == (2, 1, 0)
    assert [worlds[node].first_rank for node in (2, 1, 0)] == [0, 4, 8]
    assert [worlds[node].role for node in (2, 1, 0)] == ["worker", "worker", "ps"]
    assert {(w.world_size, w.workers, w.servers) for w in worlds.values()} == {(9, 8, 1)}
    assert {w.store_addr for w in worlds.values()} == {"host2"}


@pytest.mark.parametrize(
    ("there", "usable"),
    [((5, 3), (4, 2)), ((3, 2), (2, 2)), ((4, 1), (4, 1)), ((4, 0), (0, 0)), ((1, 2), (0, 0))],
)
def test_a_world_needs_the_least_of_both_roles(
    there: tuple[int, int], usable: tuple[int, int]
) -> None:
    spec = JobSpec(name="job", min_nodes=2, max_nodes=5, node_unit=2, servers=2, min_servers=1, max_servers=2)  # fmt: skip
    assert Rendezvous(spec).usable(Size(*there)) == Size(*usable)


def test_a_round_waits_for_servers_and_says_so() -> None:
    driver = submitted(2, 2)
    come(driver, 0, 1, 2)
    driver.join(0, 1, 2, at=10.0)
    assert driver.machine.state.phase is Phase.WAITING
    assert "node 3 (is being started)" in waiting_for(driver.machine, 12.0)
    come(driver, 3)
    driver.join(3)
    assert driver.machine.state.phase is Phase.RUNNING
    assert (driver.machine.rounds.world_size, driver.machine.rounds.workers) == (8, 4)
    (formed,) = driver.emitted(events.RoundCompleted)
    assert formed.sentence().endswith("4 nodes, 4 workers, 4 servers.")


def test_a_job_whose_servers_cannot_come_fails_with_the_count_of_both() -> None:
    driver = submitted(1, 2)
    come(driver, 0, 1)
    driver.join(0, 1)
    for _ in range(3):
        node = max(driver.machine.nodes)
        driver.give(inputs.NodeExited(node, "its agent ended"))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome.exit_code == ExitCode.INFRASTRUCTURE
    late = submitted(1, 2)
    come(late, 0, 1)
    late.join(0, 1)
    late.give(inputs.DeadlinePassed(), at=late.machine.deadline())
    assert late.machine.outcome is not None
    assert "only 1 worker and 1 server of at least 1 worker and 2 servers" in (
        late.machine.outcome.reason
    )


def test_servers_that_are_missing_do_not_make_up_for_workers() -> None:
    """Two nodes are there, as many as the job needs, and both are workers."""
    driver = running(2, 2, min_nodes=1, min_servers=1)
    driver.give(inputs.NodeExited(2, "it was killed"), inputs.NodeExited(3, "it was killed"))
    driver.join(0, 1)
    assert driver.machine.state.phase is Phase.RESTARTING
    come(driver, 4)
    driver.join(4)
    assert driver.machine.state.phase is Phase.RUNNING
    assert driver.machine.rendezvous.size == Size(2, 1)


# ---- faults, and the end


def test_a_lost_server_is_replaced_and_costs_one_round() -> None:
    driver = running(2, 2)
    commands = driver.give(inputs.NodeExited(2, "it was killed"), at=20.0)
    assert ranks(commands) == [FIRST_SERVER]
    assert {c.node_id for c in of(commands, messages.CallToRound)} == {0, 1, 3}
    launched = driver.emitted(events.NodeLaunched)[-1]
    assert launched.sentence() == "Node 4 (ps) is being started in place of node 2."
    assert driver.emitted(events.NodeLost)[-1].sentence() == "Node 2 (ps) is lost: it was killed."
    come(driver, 4)
    driver.join(0, 1, 3, 4, at=21.0)
    assert driver.machine.state.phase is Phase.RUNNING
    assert driver.machine.rendezvous.members == (0, 1, 4, 3)
    assert driver.machine.restarts.count == 1


def test_the_job_succeeds_with_its_workers_and_the_servers_are_dismissed() -> None:
    driver = running(2, 2)
    driver.give(inputs.Reported(0, Succeeded(1)))
    assert driver.machine.outcome is None
    commands = driver.give(inputs.Reported(1, Succeeded(1)))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome.exit_code == ExitCode.SUCCESS
    assert {c.node_id for c in of(commands, messages.Dismiss)} == {0, 1, 2, 3}


def test_a_server_that_fails_while_workers_finish_is_no_fault() -> None:
    """Its connection to one that has finished is closed."""
    closed = {
        "kind": FailureKind.EXCEPTION,
        "exception": "RuntimeError",
        "message": "closed by peer",
    }
    driver = running(2, 1)
    driver.give(inputs.Reported(0, Succeeded(1)))
    assert driver.fail(2, closed) == []
    assert len(driver.emitted(events.WorkerFailed)) == 1
    driver.give(inputs.Reported(1, Succeeded(1)))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome.exit_code == ExitCode.SUCCESS


def test_a_server_that_fails_before_that_is_one() -> None:
    driver = running(2, 1, max_restarts=1)
    wrong = {"kind": FailureKind.EXCEPTION, "exception": "KeyError", "message": "KeyError: 'w'"}
    commands = driver.fail(2, wrong)
    assert {c.node_id for c in of(commands, messages.CallToRound)} == {0, 1, 2}
    assert driver.machine.restarts.user_restarts == 1


def test_a_server_that_ends_by_itself_ends_nothing() -> None:
    driver = running(1, 2)
    driver.give(inputs.Reported(1, Succeeded(1)), inputs.Reported(2, Succeeded(1)))
    assert driver.status(1) is NodeStatus.SUCCEEDED
    assert driver.machine.state.phase is Phase.RUNNING
    told = driver.emitted(events.NodeSucceeded)[0]
    assert told.sentence() == "The server of node 1 ended by itself, with exit code 0."
    assert platformside.size(driver.machine, 11.0).complete
    driver.give(asked(1))
    assert driver.machine.scaling.leaving.keys() == {2}, "such a job can still be scaled"
    driver.give(inputs.NodeExited(2, "its agent ended"))
    driver.join(0, 1)
    assert driver.machine.rendezvous.size == Size(1, 1)


# ---- another number


def test_servers_grow_beside_the_running_training() -> None:
    driver = running(1, 1)
    commands = driver.give(asked(3))
    assert ranks(commands) == [FIRST_SERVER + 1, FIRST_SERVER + 2]
    assert of(commands, messages.CallToRound) == []
    (scaled,) = driver.emitted(events.JobScaled)
    assert scaled.sentence() == "The job will have 3 ps nodes instead of 1: it was asked for."
    come(driver, 2, 3)
    driver.join(2, 3, at=20.0)
    assert driver.machine.state.phase is Phase.RUNNING
    driver.give(inputs.DeadlinePassed(), at=driver.machine.deadline())
    driver.join(0, 1, at=22.0)
    assert driver.machine.rendezvous.size == Size(1, 3)
    assert driver.machine.restarts.count == 0


def test_only_servers_leave_where_fewer_of_them_are_wanted() -> None:
    driver = running(2, 3, min_servers=1)
    commands = driver.give(asked(1), at=20.0)
    assert driver.machine.scaling.leaving.keys() == {3, 4}
    assert {c.node_id for c in of(commands, messages.CallToRound)} == {0, 1, 2}
    opened = driver.emitted(events.RoundOpened)[-1]
    assert opened.reason == "the job will have 2 workers and 1 server"
    for node in (3, 4):
        driver.give(inputs.NodeExited(node, "its agent ended"))
    driver.join(0, 1, 2)
    assert driver.machine.rendezvous.size == Size(2, 1)
    assert driver.machine.incident is None


@pytest.mark.parametrize(("wanted", "servers"), [(9, 4), (1, 2), (3, 3)])
def test_a_plan_stays_within_the_bounds_of_the_servers(wanted: int, servers: int) -> None:
    driver = submitted(1, 3, min_servers=2, max_servers=4)
    driver.give(asked(wanted, "plan"))
    assert driver.machine.scaling.size == Size(1, servers)


def test_a_user_who_sets_one_role_leaves_the_other_to_plans() -> None:
    driver = submitted(2, 2, min_nodes=1, min_servers=1, max_servers=4)
    driver.give(asked(3))
    driver.give(asked(1, "plan"))
    driver.give(asked(1, "plan", role="worker"))
    scaling = driver.machine.scaling
    assert scaling.size == Size(1, 3)
    assert scaling.refusal(asked(1, "plan")) == (
        "A user has set the number of servers to 3; a plan does not change it."
    )


def test_a_multiple_of_the_node_unit_is_for_workers_only() -> None:
    driver = submitted(2, 2, node_unit=2)
    driver.give(asked(3))
    assert driver.machine.scaling.servers == 3
    assert "multiple of --node-unit, 2" in driver.machine.scaling.refusal(asked(3, role="worker"))


# ---- a master without its journal


def test_servers_that_are_found_were_asked_for() -> None:
    job = JobSpec(name="job", max_nodes=2, managed_nodes=1, servers=1, min_servers=1, max_servers=1)
    found = tuple(
        FoundNode(node_id, rank, f"process {node_id}")
        for node_id, rank in ((4, 0), (5, 1), (6, FIRST_SERVER), (7, FIRST_SERVER + 1))
    )
    machine = JobMachine()
    commands = machine.handle(inputs.Submitted(job, "", found, 5), 1.0)
    machine.validate()
    assert machine.scaling.size == Size(2, 2)
    assert machine.rendezvous.servers == {6, 7}
    assert ranks(commands) == []


def test_a_server_that_is_missing_is_started() -> None:
    job = JobSpec(name="job", managed_nodes=1, servers=2, min_servers=1, max_servers=2)
    machine = JobMachine()
    found = (
        FoundNode(3, 0, "process 3"),
        FoundNode(4, FIRST_SERVER + 1, "process 4"),
    )
    assert ranks(machine.handle(inputs.Submitted(job, "", found, 5), 1.0)) == [FIRST_SERVER]
