"""Jobs whose number of nodes changes while they run, among real agent machines."""

import asyncio

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.node import NodeStatus
from tests.simulation.cluster import Cluster
from tests.simulation.nodes import Delays, SimulatedWorkers

SEEDS = range(8)


def started(minimum: int, maximum: int, **options: object) -> Cluster:
    """A cluster whose first round trains."""
    delays = options.pop("delays", Delays())
    seed = options.pop("seed", 0)
    spec = JobSpec(
        name="scaled", min_nodes=minimum, max_nodes=maximum, managed_nodes=maximum, **options
    )
    cluster = Cluster(spec, steps=400, seed=seed, delays=delays)
    cluster.run_until(lambda: cluster.training)
    return cluster


def settle(cluster: Cluster) -> None:
    cluster.run(50.0)
    assert cluster.training, cluster.describe()


def nodes_of_rounds(cluster: Cluster) -> list[int]:
    bodies = [event.body for event in cluster.events]
    return [body.nodes for body in bodies if isinstance(body, events.RoundCompleted)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_grows_and_shrinks_as_its_user_asks_and_nothing_counts_as_a_fault(seed):
    cluster = started(2, 2, seed=seed)
    cluster.scale(4)
    settle(cluster)
    assert cluster.machine.rounds.world_size == 8
    cluster.scale(1)
    settle(cluster)
    assert cluster.machine.rounds.world_size == 2
    machine = cluster.machine
    assert [n.status for n in machine.nodes.values()] == [
        NodeStatus.RUNNING,
        *[NodeStatus.RELEASED] * 3,
    ]
    assert len(cluster.alive) == 1
    assert nodes_of_rounds(cluster) in ([2, 4, 1], [2, 3, 4, 1])
    assert (machine.restarts.count, machine.incident) == (0, None)
    assert not cluster.ledger.goodput(cluster.time.now).incidents
    outcome = cluster.finish()
    assert (outcome.exit_code, outcome.restarts) == (ExitCode.SUCCESS, 0)


@pytest.mark.parametrize("fails", [True, False])
def test_savers_that_do_not_answer_keep_no_job_from_shrinking(monkeypatch, fails) -> None:
    async def store_at_end(_: SimulatedWorkers, *, partial: bool) -> None:
        if fails:
            raise OSError("no such process")
        await asyncio.Event().wait()

    monkeypatch.setattr(SimulatedWorkers, "store_at_end", store_at_end)
    cluster = started(2, 2)
    cluster.scale(1)
    settle(cluster)
    assert (cluster.machine.rounds.world_size, len(cluster.alive)) == (2, 1)
    assert cluster.finish().exit_code == ExitCode.SUCCESS


@pytest.mark.parametrize("submitted", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_round_waits_until_the_nodes_that_leave_are_gone(seed, submitted):
    cluster = started(1, submitted, seed=seed, delays=Delays(stop=(5.0, 6.0), store=(1.0, 2.0)))
    if submitted < 3:
        cluster.scale(3)
        cluster.run_until(lambda: cluster.training and cluster.machine.rounds.world_size == 6)
    last = cluster.machine.rendezvous.round
    cluster.scale(1)
    cluster.run_until(lambda: cluster.training and cluster.machine.rendezvous.round > last)
    assert len(cluster.alive) == 1
    runs = cluster.program.runs
    assert runs[last + 1].first_step == runs[last].first_step + runs[last].steps
    spent = cluster.ledger.goodput(cluster.time.now).seconds
    assert spent["fault_detection"] == 0
    assert 2 * 6.0 < spent["shutdown"] < 2 * 9.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_leaves_while_its_master_is_away_is_no_loss(seed):
    cluster = started(1, 3, seed=seed)
    cluster.scale(2)
    cluster.kill_master(10.0)
    settle(cluster)
    assert cluster.machine.rounds.world_size == 4
    assert cluster.machine.nodes[2].status is NodeStatus.RELEASED
    assert cluster.machine.restarts.count == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_does_not_leave_is_killed(seed):
    limits = Limits(release_grace=20.0, last_call_timeout=5.0)
    cluster = started(1, 2, seed=seed, limits=limits, shutdown_timeout=5.0)
    cluster.silence(cluster.nodes[1], 50.0)
    cluster.scale(1)
    cluster.run(24.0)
    assert cluster.machine.rendezvous.collecting, "it may be storing its part"
    cluster.run(6.0)
    assert cluster.training
    assert cluster.machine.nodes[1].status is NodeStatus.RELEASED
    assert cluster.machine.nodes[1].reason == "it did not leave in time"
    assert (len(cluster.alive), cluster.machine.restarts.count) == (1, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_is_asked_for_again_comes_as_a_new_node(seed):
    cluster = started(1, 3, seed=seed)
    cluster.scale(1)
    cluster.scale(3)
    settle(cluster)
    assert cluster.machine.rounds.world_size == 6
    assert [n.node_rank for n in cluster.machine.nodes.values()] == [0, 1, 2, 1, 2]
    assert cluster.finish().restarts == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_has_lost_its_journal_keeps_the_nodes_that_it_was_scaled_to(seed):
    cluster = started(1, 2, seed=seed)
    cluster.scale(4)
    settle(cluster)
    cluster.lose_disk()
    settle(cluster)
    assert cluster.machine.rounds.world_size == 8
    assert cluster.machine.scaling.wanted == 4


@pytest.mark.parametrize("seed", SEEDS)
def test_a_master_without_its_journal_that_is_to_have_fewer_nodes_adopts_the_round_first(seed):
    cluster = started(1, 1, seed=seed)
    cluster.scale(3)
    cluster.run_until(lambda: cluster.training and cluster.machine.rounds.world_size == 6)
    cluster.lose_disk()
    cluster.run_until(lambda: not cluster.master_away and cluster.machine.adoption.pending)
    cluster.scale(1)
    settle(cluster)
    assert cluster.machine.rounds.world_size == 2
    assert [event for event in cluster.events if isinstance(event.body, events.MasterAdopted)]
    assert cluster.machine.incident is None
    assert cluster.finish().restarts == 0
