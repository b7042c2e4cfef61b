"""A job with a chief: it alone is the world; evaluators, workers and servers start, fail and return by themselves."""

from typing import Any

import pytest

from dlrover.master.machine import inputs
from dlrover.master.machine.state import Phase
from dlrover.master.views.status import status_of
from dlrover.rpc.messages import AssignWorld, CallToRound, Join, Succeeded
from dlrover.spec import events
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import JobSpec
from dlrover.spec.node import FIRST_SERVER, Size
from dlrover.spec.world import Offer
from tests.support.drivers import JobDriver

KILLED = {"kind": FailureKind.SIGNAL, "signal": 9}
ROLES = ["chief", "evaluator", "worker", "worker", "ps"]
"""Roles of nodes 0 to 4."""
SPEC: dict[str, Any] = {
    "chief": True, "other_nodes": 2, "managed_nodes": 4, "servers": 1, "min_servers": 1, "max_servers": 1,
    "server_failover": "instance",
}  # fmt: skip


def running() -> JobDriver:
    driver = JobDriver(4, 4, **SPEC)
    for node in range(len(ROLES)):
        driver.give(inputs.NodePlaced(node, f"process {node}"))
        driver.connect(node, claims=node)
    driver.join(0, at=10.0)
    for node in range(1, len(ROLES)):
        join(driver, node)
    return driver


def join(driver: JobDriver, node: int) -> list[inputs.Command]:
    number = driver.machine.instances.next_round(driver.machine.nodes[node])
    return driver.give(inputs.Reported(node, Join(number, Offer(1, f"host{node}", 29400))))


def test_places_follow_the_ranks() -> None:
    job = JobSpec(name="job", **SPEC)
    ranks = [0, 1, 2, 3, FIRST_SERVER]
    assert [job.place(rank) for rank in ranks] == [
        ("chief", 0), ("evaluator", 0), ("worker", 0), ("worker", 1), ("ps", 0),
    ]  # fmt: skip
    assert [job.is_instance(rank) for rank in ranks] == [False, True, True, True, True]
    plain = JobSpec(name="job", other_nodes=2)
    assert [plain.place(rank) for rank in (0, 2, FIRST_SERVER)] == [
        ("worker", 0),
        ("worker", 2),
        ("ps", 0),
    ]
    assert not plain.is_instance(1)


def test_the_chief_alone_is_the_world() -> None:
    driver = running()
    machine = driver.machine
    assert (machine.state.phase, machine.rendezvous.size) == (Phase.RUNNING, Size(1))
    worlds = [machine.instances.worlds[node] for node in range(1, 5)]
    assert [(w.instance_role, w.index, w.instances) for w in worlds] == [
        ("evaluator", 0, 1), ("worker", 0, 2), ("worker", 1, 2), ("ps", 0, 1),
    ]  # fmt: skip
    status = status_of(machine, driver.now, {})
    assert [node.role for node in status.nodes] == ROLES
    assert status.processes() == "5 workers and 1 server"  # the chief has two processes here


@pytest.mark.parametrize("node", [1, 2, 3, 4])
def test_whoever_fails_but_the_chief_restarts_alone(node: int) -> None:
    driver = running()
    world = driver.machine.instances.worlds[node]
    commands = driver.fail(node, KILLED, at=100.0, round=world.round, rank=0)
    assert [(c.node_id, type(c.message)) for c in commands] == [(node, CallToRound)]
    assert [type(c.message) for c in join(driver, node)] == [AssignWorld]
    assert (driver.machine.rendezvous.round, driver.machine.restarts.count) == (1, 0)
    (event,) = driver.emitted(events.InstanceRestarts)
    assert event.role == ROLES[node]


def test_the_chief_restarts_without_the_others_and_its_success_ends_the_job() -> None:
    driver = running()
    commands = driver.fail(0, KILLED, at=100.0)
    assert {c.node_id for c in commands if isinstance(c, inputs.Say)} == {0}
    driver.join(0, at=101.0)
    assert driver.machine.rendezvous.round == 2
    driver.give(inputs.Reported(0, Succeeded(2)), at=200.0)
    assert driver.machine.state.phase is Phase.SUCCEEDED


def test_workers_are_added_beside_the_chief() -> None:
    driver = running()
    commands = driver.give(inputs.ScaleRequested(3, "more", "user", "worker"))
    (launch,) = [c for c in commands if hasattr(c, "node_rank")]
    assert (launch.node_rank, driver.machine.fleet.role(launch.node_id)) == (4, "worker")
    assert not driver.machine.rendezvous.collecting
