"""The ledger in troubled jobs, against a slow reading of the same journal that looks at every node."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import pytest

from dlrover.dashboard.inspect.timeline import Timeline
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.job import JobMachine
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.node import NodeStatus
from dlrover.spec.outcome import Cause
from tests.simulation.cluster import WORKER_KINDS, Cluster
from tests.simulation.nodes import Delays

SEEDS = range(200)


def troubled(seed: int) -> Cluster:
    """A job of two minutes with faults of all kinds, which repeats steps after each."""
    chance = random.Random(seed)
    maximum = chance.randint(1, 4)
    limits = Limits(
        max_infrastructure_restarts=1000, no_progress_restarts=1000, node_start_attempts=1000
    )
    job = JobSpec(
        name="troubled",
        min_nodes=chance.randint(1, maximum),
        max_nodes=maximum,
        managed_nodes=maximum * chance.randrange(2),
        max_restarts=1000,
        survive=seed % 5 == 4,
        limits=limits,
    )
    nodes = 0 if job.managed_nodes else maximum + chance.randrange(2)
    delays = Delays(revive=(0.1, 20.0))
    cluster = Cluster(job, nodes=nodes, steps=chance.choice([5, 100]), seed=seed, delays=delays)
    cluster.program.checkpoint_every = chance.choice([1, 10])
    cluster.inject(
        [
            lambda n: cluster.kill_worker(n, chance.choice(WORKER_KINDS), chance.randrange(3)),
            cluster.kill_agent,
            cluster.stop_agent,
            lambda n: cluster.disconnect(n, chance.choice([0.0, 2.0, 20.0])),
            lambda n: cluster.silence(n, chance.choice([0.5, 30.0, 70.0])),
            lambda _: cluster.kill_master(chance.choice([0.1, 5.0, 30.0])),
            lambda _: cluster.add_node() if chance.random() < 0.3 else None,
            lambda _: cluster.scale(chance.randint(0, 6), chance.choice(["user", "plan"])),
        ],
        every=chance.choice([2.0, 5.0, 20.0]),
        until=120.0,
    )
    return cluster


def there(machine: JobMachine) -> set[int]:
    """The nodes whose time counts."""
    over = machine.outcome is not None
    return {
        node.id
        for node in machine.nodes.values()
        if not (node.status.final or node.gone or (over and not node.connected))
    }


def coarse(machine: JobMachine, node_id: int) -> set[str]:
    """What a node's time may go into while the machine is in this state."""
    status, collecting = machine.nodes[node_id].status, machine.rendezvous.collecting
    if machine.outcome is not None:
        return {"shutdown"}
    if machine.state.leaves(node_id):
        return {"shutdown"}
    if status is NodeStatus.PENDING:
        return {"waiting_for_resources", "degraded"}
    if collecting:
        return {"waiting_for_resources", "rendezvous"}
    if status is NodeStatus.RUNNING:
        return {
            "productive", "start_up", "recomputed_steps", "fault_detection", "shutdown", "not_measured",
            *(["degraded"] if machine.job.survive else []),
        }  # fmt: skip
    return {"shutdown"} if status is NodeStatus.SUCCEEDED else {"idle", "degraded"}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("block", range(4))
def test_every_microsecond_of_every_node_has_a_cause_that_fits(block: int) -> None:
    for seed in SEEDS[block::4]:
        cluster = troubled(seed)
        cluster.finish(3600.0)
        check(cluster.journal, seed)


def check(journal: list[tuple[float, inputs.Input]], seed: int) -> None:
    machine, timeline = JobMachine(), Timeline()
    ledger = Ledger(timeline)
    # by node: (since, until, causes that are possible)
    expected: dict[int, list[tuple[int, int, set[str]]]] = defaultdict(list)
    last, before = 0, dict[int, set[str]]()
    for time, event in journal:
        now = round(time * 1e6)
        for node, causes in before.items():
            if now > last:
                expected[node].append((last, now, causes))
        machine.handle(event, time)
        ledger.handle(event, time, machine)
        assert ledger.accounts.keys() == there(machine), f"seed {seed}"
        last, before = now, {node: coarse(machine, node) for node in there(machine)}
    ledger.finish(journal[-1][0])
    wall = 0
    for node, intervals in expected.items():
        spans = timeline.spans(node)
        assert all(a.until <= b.since for a, b in itertools.pairwise(spans))
        assert sum(s.until - s.since for s in spans) == sum(b - a for a, b, _ in intervals)
        wall += sum(b - a for a, b, _ in intervals)
        for span in spans:
            assert fits(span.since, span.until, span.cause, intervals), f"seed {seed}: {span}"
    goodput = ledger.goodput(journal[-1][0])
    assert wall == ledger.wall(last)
    assert sum(ledger.sums(last)) == wall
    assert all(incident.over for incident in goodput.incidents)
    assert all(i.until >= i.since for i in goodput.incidents)


def fits(since: int, until: int, cause: Cause, intervals: list[tuple[int, int, set[str]]]) -> bool:
    """Whether the cause is possible all the time. A round's causes are not in order, so all its are."""
    touched = [causes for a, b, causes in intervals if a < until and b > since]
    return all(cause.value in causes for causes in touched)


def test_a_job_that_repeats_steps_tells_how_many() -> None:
    job = JobSpec(name="job", min_nodes=3, max_nodes=3, managed_nodes=3)
    cluster = Cluster(job, steps=60, seed=4)
    cluster.program.checkpoint_every = 20
    cluster.run_until(lambda: cluster.program.steps_done == 37)
    cluster.kill_agent(cluster.nodes[1])
    cluster.finish()
    (incident,) = cluster.ledger.goodput(cluster.time.now).incidents
    assert incident.steps_lost == 17
    step = 0.55 * 3
    # The steps made again, and the one that the kill cut off.
    assert incident.seconds["recomputed_steps"] == pytest.approx(17.5 * step, rel=0.1)
    seconds = cluster.ledger.goodput(cluster.time.now).seconds
    assert seconds["productive"] == pytest.approx(60 * step, rel=0.1)


@pytest.mark.slow
def test_the_ledger_of_many_nodes_costs_little_for_each_input() -> None:
    count = 1_000
    job = JobSpec(name="job", min_nodes=count, max_nodes=count, managed_nodes=count)
    cluster = Cluster(job, nproc=1, steps=3, seed=1, validate_every=10**9)
    cluster.finish()
    touched = 0

    class Counting(Ledger):
        def _switch(self, *args: object) -> None:
            nonlocal touched
            touched += 1
            super()._switch(*args)

    machine, ledger = JobMachine(), Counting()
    for time, event in cluster.journal:
        machine.handle(event, time)
        ledger.handle(event, time, machine)
    # Each node is looked at for its own inputs, and at the few changes that concern all.
    assert touched < 3 * len(cluster.journal)
