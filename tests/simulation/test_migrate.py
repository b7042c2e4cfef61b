"""Nodes that take the place of others, among real agent machines and faults."""

import pytest

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.spec import events
from dlrover.spec.job import JobSpec, Limits
from tests.simulation.cluster import Cluster
from tests.simulation.nodes import Delays

SEEDS = range(2)
NODES = 3


def started(seed: int, steps: int = 400, **options: object) -> Cluster:
    """A cluster of three launched nodes whose first round trains."""
    spec = JobSpec(
        name="migrating",
        min_nodes=NODES,
        max_nodes=NODES,
        managed_nodes=NODES,
        limits=Limits(join_timeout=60.0),
        **options,
    )
    cluster = Cluster(spec, steps=steps, seed=seed, delays=Delays(launch=(8.0, 8.0)))
    cluster.run_until(lambda: cluster.training)
    return cluster


def migrate(cluster: Cluster, node: int = 1) -> None:
    cluster._submit(inputs.MigrationRequested(node, 1.5, 2.0, "a test"))


def rounds(cluster: Cluster) -> int:
    return sum(isinstance(event.body, events.RoundCompleted) for event in cluster.events)


@pytest.mark.parametrize("seed", SEEDS)
def test_training_goes_on_while_the_node_starts_and_stops_for_one_round(seed):
    cluster = started(seed)
    migrate(cluster)
    cluster.run(7.0)
    assert cluster.training
    assert cluster.machine.rendezvous.round == 1
    cluster.run(30.0)
    assert cluster.training, cluster.describe()
    machine = cluster.machine
    assert machine.rendezvous.members == (0, 3, 2)
    assert (machine.nodes[3].cpu_factor, machine.nodes[3].memory_factor) == (1.5, 2.0)
    assert (rounds(cluster), machine.restarts.count, machine.incident) == (2, 0, None)
    first, second = cluster.program.runs[1], cluster.program.runs[2]
    assert second.first_step == first.first_step + first.steps
    assert cluster.finish().restarts == 0


FAULTS = {
    "a worker is killed": lambda cluster, node: cluster.kill_worker(node),
    "an agent is killed": lambda cluster, node: cluster.kill_agent(node),
    "a connection breaks": lambda cluster, node: cluster.disconnect(node, 1.0),
    "a connection is away for long": lambda cluster, node: cluster.disconnect(node, 30.0),
    "the master is killed": lambda cluster, _node: cluster.kill_master(2.0),
    "the master dies half way": lambda cluster, _node: cluster.kill_master(2.0, after_commands=1),
    "the master loses its disk": lambda cluster, _node: cluster.lose_disk(2.0),
}


@pytest.mark.parametrize("victim", ["the one that leaves", "the one that comes", "another one"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_moment_leaves_one_node_of_each_rank(fault, victim):
    number = {"the one that leaves": 1, "the one that comes": NODES, "another one": 2}[victim]
    for seed in SEEDS:
        for moment in (0.5, 8.2, 8.6, 9.5):
            cluster = started(seed, steps=200)
            migrate(cluster)
            node = cluster.nodes[number]
            cluster.time.after(moment, FAULTS[fault], cluster, node)
            cluster.run(120.0)
            machine = cluster.machine
            where = f"seed {seed}, moment {moment}: {cluster.describe()}"
            if machine.outcome is None:
                ranks = [machine.nodes[i].node_rank for i in machine.rendezvous.members]
                assert cluster.training, where
                assert ranks == list(range(NODES)), where
                assert len(cluster.alive) == NODES, where
            assert cluster.finish().exit_code == ExitCode.SUCCESS, where


@pytest.mark.parametrize("seed", range(3))
def test_many_migrations_among_many_faults(seed):
    cluster = started(seed, steps=1500)
    faults = [
        cluster.kill_worker,
        cluster.kill_agent,
        cluster.stop_agent,
        lambda node: cluster.disconnect(node, 2.0),
        lambda _node: cluster.kill_master(2.0),
        lambda _node: migrate(cluster, cluster.time.random.choice(list(cluster.machine.nodes))),
    ]
    cluster.inject(faults, every=7.0, until=600.0)
    assert cluster.finish().exit_code == ExitCode.SUCCESS, cluster.describe()
