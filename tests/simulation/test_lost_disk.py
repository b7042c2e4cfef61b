"""A master that has lost its journal goes on with what its nodes run, in any state of the job."""

import random

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events
from dlrover.spec.events import EventBody
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import JobSpec, Limits
from tests.simulation.cluster import Cluster
from tests.simulation.nodes import Delays, SimulatedNode

LIMITS = Limits(
    max_infrastructure_restarts=1000, no_progress_restarts=1000, node_start_attempts=1000
)
SEEDS = range(8)
SOME_TIME = 50.0
"""Seconds in which everything happens that follows from one fault."""


def job(minimum: int, maximum: int, *, managed: bool, **options: object) -> JobSpec:
    return JobSpec(
        name="simulated",
        min_nodes=minimum,
        max_nodes=maximum,
        managed_nodes=maximum if managed else 0,
        **({"limits": LIMITS, "max_restarts": 1000} | options),
    )


def started(spec: JobSpec, seed: int, rounds: int = 1) -> Cluster:
    """A cluster that trains in round ``rounds``."""
    cluster = Cluster(spec, nodes=0 if spec.managed_nodes else spec.max_nodes, steps=300, seed=seed)
    for round_ in range(1, rounds + 1):
        cluster.run_until(lambda r=round_: cluster.training and current(cluster) == r)
        if round_ < rounds:
            cluster.kill_worker(cluster.nodes[0])
    return cluster


def current(cluster: Cluster) -> int:
    return cluster.machine.rendezvous.round


def told(cluster: Cluster, kind: type[EventBody]) -> list[EventBody]:
    return [event.body for event in cluster.events if isinstance(event.body, kind)]


def runs(cluster: Cluster) -> list[tuple[SimulatedNode, object]]:
    """Which node runs the workers of which run: a restarted worker is in another one."""
    return [(node, node.workers.run) for node in cluster.alive.values()]


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_disk_stops_no_worker(seed, managed):
    cluster = started(job(3, 3, managed=managed), seed, rounds=3)
    before, opened = runs(cluster), len(told(cluster, events.RoundOpened))
    ranks = {n.machine.node_id: n.first_rank for n in cluster.alive.values()}
    epoch = max(node.machine.epoch for node in cluster.alive.values())
    cluster.lose_disk()
    cluster.run(SOME_TIME)
    machine = cluster.machine
    assert runs(cluster) == before
    assert told(cluster, events.MasterAdopted) == [events.MasterAdopted(3, 3)]
    assert len(told(cluster, events.RoundOpened)) == opened
    assert len(told(cluster, events.JobSubmitted)) == 1
    assert {i: machine.rounds.worlds[i].first_rank for i in machine.rendezvous.members} == ranks
    assert machine.restarts.count == 2
    assert machine.progress.steps > 0
    assert cluster.epoch > epoch
    cluster.kill_worker(cluster.nodes[1])
    cluster.run(SOME_TIME)
    assert (current(cluster), machine.restarts.count) == (4, 3)
    cluster.kill_master()  # its new journal replays
    outcome = cluster.finish()
    assert outcome.exit_code == ExitCode.SUCCESS
    numbers = [event.seq for event in cluster.events]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_managed_node_keeps_its_platform_handle(seed):
    cluster = started(job(2, 3, managed=True), seed)
    cluster.lose_disk()
    cluster.run(SOME_TIME)
    cluster.kill_agent(cluster.nodes[1])  # found by the platform: replaced at once
    cluster.run(SOME_TIME)
    assert cluster.machine.rounds.world_size == 6
    assert len(cluster.nodes) == 4
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_died_meanwhile_costs_one_round_above_the_last(seed, managed):
    cluster = started(job(2, 3, managed=managed), seed, rounds=2)
    cluster.lose_disk(2.0)
    cluster.kill_agent(cluster.nodes[2])
    cluster.run_until(lambda: cluster.training and current(cluster) > 2, 40.0)
    assert not told(cluster, events.MasterAdopted)
    (opened,) = [e for e in told(cluster, events.RoundOpened) if e.round == 3]
    assert "2 of 3 nodes of round 2 reported it" in opened.reason
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_failure_that_no_master_has_heard_of_is_handled_after_the_adoption(seed):
    cluster = started(job(3, 3, managed=False, max_restarts=0), seed)
    cluster.lose_disk(1.0)
    cluster.kill_worker(cluster.nodes[1], FailureKind.EXCEPTION, echoes=2)
    outcome = cluster.finish(60.0)
    assert outcome.exit_code == ExitCode.USER_CODE
    assert outcome.failure is not None
    assert outcome.failure.exception == "ValueError"
    assert len(told(cluster, events.MasterAdopted)) == 1


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_whose_workers_end_while_the_disk_is_lost_succeeds(seed, managed):
    cluster = started(job(3, 3, managed=managed), seed)
    cluster.program.steps = cluster.program.steps_done + 1
    cluster.lose_disk(30.0)
    outcome = cluster.finish()
    assert outcome.exit_code == ExitCode.SUCCESS
    assert len(told(cluster, events.RoundOpened)) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_that_wait_for_a_round_form_one_and_spares_are_taken_in(seed):
    cluster = started(job(2, 4, managed=False), seed)
    spare = cluster.add_node()
    cluster.run(SOME_TIME)
    cluster.lose_disk()
    cluster.run(SOME_TIME)
    assert len(told(cluster, events.MasterAdopted)) == 1
    cluster.kill_agent(cluster.nodes[0])
    cluster.run(SOME_TIME)
    assert spare.training
    assert cluster.machine.rounds.world_size == 8


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "block", [pytest.param(n, marks=pytest.mark.heavy if n > 1 else ()) for n in range(4)]
)
def test_disks_lost_in_any_state_keep_no_job_from_its_end(block):
    for seed in range(block * 50, (block + 1) * 50):
        chance = random.Random(seed)
        maximum = chance.randint(1, 5)
        managed = chance.random() < 0.5
        cluster = Cluster(
            job(chance.randint(1, maximum), maximum, managed=managed),
            nodes=0 if managed else maximum + chance.randrange(2),
            steps=chance.choice([5, 40, 100]),
            seed=seed,
            delays=Delays(revive=(0.1, 20.0)),
        )
        cluster.inject(
            [
                lambda n, c=cluster: c.kill_worker(n, FailureKind.SIGNAL, 2),
                cluster.kill_agent,
                cluster.stop_agent,
                lambda n, c=cluster: c.disconnect(n, 2.0),
                lambda _, c=cluster: c.kill_master(1.0, after_commands=1),
                lambda _, c=cluster: c.lose_disk(c.time.random.choice([0.1, 1.0, 20.0])),
            ],
            every=chance.choice([1.0, 5.0, 20.0]),
            until=120.0,
        )
        outcome = cluster.finish(limit=3600.0)
        assert outcome.exit_code == ExitCode.SUCCESS, f"seed {seed}: {outcome.reason}"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [500, pytest.param(2_000, marks=pytest.mark.heavy)])
def test_a_world_of_many_nodes_is_adopted(count):
    spec = job(count, count, managed=False)
    cluster = Cluster(spec, nodes=count, nproc=1, steps=60, seed=1, validate_every=2_000)
    cluster.run_until(lambda: cluster.training)
    cluster.lose_disk()
    cluster.run_until(lambda: cluster.machine.adoption.pending, 20.0)
    cluster.run_until(lambda: not cluster.machine.adoption.pending, 20.0)
    assert told(cluster, events.MasterAdopted)
    assert cluster.finish().exit_code == ExitCode.SUCCESS
    assert len(told(cluster, events.RoundOpened)) == 1
