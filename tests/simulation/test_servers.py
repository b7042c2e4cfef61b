"""Jobs with parameter servers among real agent machines: faults by seed."""

import random

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.node import Size, is_server
from tests.simulation.cluster import WORKER_KINDS, Cluster
from tests.simulation.nodes import SimulatedNode

SEEDS = range(8)
ENOUGH = Limits(
    max_infrastructure_restarts=1000, no_progress_restarts=1000, node_start_attempts=1000
)


def started(workers: int, servers: int, seed: int, **options: object) -> Cluster:
    """A cluster whose first round trains; its nodes are the workers, then the servers."""
    fields = {"min_nodes": 1, "max_nodes": workers, "min_servers": 1, "max_servers": servers}
    spec = JobSpec(
        name="served", managed_nodes=workers, servers=servers, limits=ENOUGH, max_restarts=1000,
        **(fields | options),
    )  # fmt: skip
    cluster = Cluster(spec, steps=300, seed=seed)
    cluster.run_until(lambda: cluster.training)
    return cluster


def settle(cluster: Cluster) -> None:
    cluster.run(50.0)
    assert cluster.training, cluster.describe()


def size(cluster: Cluster) -> Size:
    return cluster.machine.rendezvous.size


@pytest.mark.parametrize("seed", SEEDS)
def test_the_job_ends_with_its_workers_and_the_servers_leave(seed: int) -> None:
    cluster = started(2, 2, seed)
    assert (size(cluster), cluster.machine.rounds.world_size, cluster.machine.rounds.workers) == (
        (2, 2),
        6,
        4,
    )
    outcome = cluster.finish()
    assert (outcome.exit_code, outcome.restarts) == (ExitCode.SUCCESS, 0)
    succeeded = [e.body.node for e in cluster.events if isinstance(e.body, events.NodeSucceeded)]
    assert sorted(succeeded) == [0, 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_server_of_a_job_of_fixed_size_costs_one_round(seed: int) -> None:
    cluster = started(2, 2, seed, min_nodes=2, min_servers=2)
    cluster.kill_agent(cluster.nodes[2 + seed % 2])
    settle(cluster)
    rounds = [e for e in cluster.events if isinstance(e.body, events.RoundOpened)]
    assert (len(rounds), cluster.machine.restarts.count, size(cluster)) == (2, 1, (2, 2))
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("seed", SEEDS)
def test_both_roles_grow_and_shrink(seed: int) -> None:
    cluster = started(2, 1, seed)
    cluster.scale(3, role="ps")
    cluster.scale(4)
    settle(cluster)
    assert size(cluster) == (4, 3)
    cluster.scale(1, role="ps")
    settle(cluster)
    assert size(cluster) == (4, 1)
    cluster.scale(1)
    settle(cluster)
    assert size(cluster) == (1, 1)
    assert (cluster.machine.restarts.count, cluster.machine.incident) == (0, None)
    assert cluster.finish().restarts == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_master_without_its_journal_adopts_a_world_with_servers(seed: int) -> None:
    cluster = started(2, 1, seed)
    cluster.scale(2, role="ps")
    settle(cluster)
    cluster.lose_disk()
    settle(cluster)
    adopted = [e for e in cluster.events if isinstance(e.body, events.MasterAdopted)]
    assert (len(adopted), size(cluster), cluster.machine.scaling.size) == (1, (2, 2), (2, 2))
    assert cluster.machine.incident is None
    cluster.kill_agent(next(n for n in cluster.alive.values() if is_server(n.node_rank)))
    settle(cluster)
    assert size(cluster) == (2, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_server_that_is_a_world_by_itself_costs_the_workers_nothing(seed: int) -> None:
    cluster = started(2, 2, seed, min_nodes=2, server_failover="instance")
    settle(cluster)
    cluster.kill_agent(cluster.nodes[2])
    cluster.kill_worker(cluster.nodes[3], WORKER_KINDS[seed % 2])
    settle(cluster)
    instances = cluster.machine.instances
    assert sorted(w.index for w in instances.worlds.values()) == [0, 1]
    assert sorted(instances.starts.values()) == [2, 2]
    rounds = [e for e in cluster.events if isinstance(e.body, events.RoundOpened)]
    assert (len(rounds), cluster.machine.restarts.count, size(cluster)) == (1, 0, (2, 0))
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("failover", ["job", "instance"])
@pytest.mark.parametrize("seed", range(24))
def test_random_faults_leave_a_job_that_ends_well(seed: int, failover: str) -> None:
    """The machines are validated, and the journal is replayed, after every input."""
    unit = 1 + seed % 2
    cluster = started(3, 2, seed, node_unit=unit, min_nodes=unit, server_failover=failover)
    chance = random.Random(seed)

    def scale(_node: SimulatedNode) -> None:
        workers = unit * chance.randint(1, 2)
        wanted = (chance.randint(1, 4), "ps") if chance.random() < 0.5 else (workers, "worker")
        cluster.scale(wanted[0], role=wanted[1])

    def pause(node: SimulatedNode) -> None:
        cluster.silence(node, chance.choice((1.0, 80.0)))

    def fail(node: SimulatedNode) -> None:
        cluster.kill_worker(node, chance.choice(WORKER_KINDS), echoes=chance.randint(0, 2))

    faults = [
        cluster.kill_agent,
        cluster.stop_agent,
        fail,
        cluster.disconnect,
        pause,
        scale,
        lambda _node: cluster.kill_master(chance.uniform(0.1, 20.0)),
        lambda _node: cluster.kill_master(1.0, after_commands=chance.randint(0, 3)),
        lambda _node: cluster.lose_disk(),
    ]
    cluster.inject(faults, every=8.0, until=cluster.time.now + 120.0)
    outcome = cluster.finish()
    assert outcome.exit_code == ExitCode.SUCCESS, outcome.reason
    cluster.run(5.0)
    assert all(node.status.final for node in cluster.machine.nodes.values())
