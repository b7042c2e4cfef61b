"""Spares in whole jobs on a virtual clock: they take places at once, and what happens to them matters to nobody."""

from __future__ import annotations

import random

import pytest

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.rpc.messages import Hello
from dlrover.spec import events
from dlrover.spec.job import Limits
from dlrover.spec.node import FIRST_SPARE, NodeStatus
from tests.simulation.cluster import Cluster
from tests.simulation.nodes import Delays, SimulatedNode
from tests.simulation.test_job_machine import job, rounds, started

pytestmark = pytest.mark.slow

SLOW = Delays(launch=(300.0, 400.0), step=(0.5, 0.6))
"""A node takes minutes to start."""


def spares(cluster: Cluster) -> list[SimulatedNode]:
    """The nodes that are spares now."""
    ready = cluster.machine.spares
    return [n for n in cluster.alive.values() if ready.of(n.machine.node_id)]


def with_spares(count: int = 1, seed: int = 0, **options: object) -> Cluster:
    """A cluster of 4 nodes that trains, and whose spares are ready."""
    options = {"steps": 4000, "delays": SLOW} | options
    spec = options.pop("spec", None) or job(4, 4, managed=True, spares=count)
    cluster = started(spec, seed=seed, **options)
    cluster.run_until(lambda: len(spares(cluster)) == count)
    return cluster


def told(cluster: Cluster, kind: type) -> list[events.EventBody]:
    return [event.body for event in cluster.events if isinstance(event.body, kind)]


@pytest.mark.parametrize("seed", range(2))
def test_a_spare_takes_the_place_of_a_lost_node_at_once(seed: int) -> None:
    cluster = with_spares(seed=seed)
    spare, victim = spares(cluster)[0], cluster.nodes[seed]
    assert cluster.machine.rounds.world_size == 8
    assert spare.first_rank == -1
    ranks = victim.first_rank
    cluster.kill_agent(victim)
    cluster.run_until(lambda: cluster.training and cluster.machine.rendezvous.round == 2, 30.0)
    assert (spare.first_rank, spare.workers.place) == (ranks, victim.node_rank)
    taken = told(cluster, events.SpareTakesPlace)
    assert taken == [events.SpareTakesPlace(spare.machine.node_id, victim.machine.node_id)]
    assert rounds(cluster) == 2
    cluster.run_until(lambda: len(spares(cluster)) == 1)  # replenished while the job trains
    assert rounds(cluster) == 2
    assert cluster.finish().exit_code == ExitCode.SUCCESS


def test_two_nodes_lost_at_once_take_two_spares_and_a_third_waits_for_a_launch() -> None:
    cluster = with_spares(2)
    for victim in cluster.nodes[:3]:
        cluster.kill_agent(victim)
    cluster.run_until(lambda: cluster.machine.rendezvous.collecting)
    cluster.run(60.0)
    assert len(told(cluster, events.SpareTakesPlace)) == 2
    assert not cluster.training
    cluster.run_until(lambda: cluster.training)
    assert cluster.machine.rounds.world_size == 8


def test_the_loss_of_a_spare_interrupts_nobody() -> None:
    cluster = with_spares()
    cluster.kill_agent(spares(cluster)[0])
    cluster.run_until(lambda: not spares(cluster))
    cluster.run_until(lambda: len(spares(cluster)) == 1)
    assert (rounds(cluster), cluster.machine.restarts.count) == (1, 0)
    assert cluster.finish().exit_code == ExitCode.SUCCESS


def test_a_spare_that_ends_with_its_job_is_none_any_more() -> None:
    cluster = with_spares()
    (spare,) = spares(cluster)
    cluster.stop()
    cluster._submit(inputs.NodeExited(spare.machine.node_id, "its agent left"))
    assert not spares(cluster)
    assert cluster.finish().exit_code == ExitCode.STOPPED


def test_a_spare_that_cannot_start_is_tried_again_later() -> None:
    limits = Limits(node_start_attempts=2, restart_window=1000.0)
    spec = job(4, 4, managed=True, spares=1, limits=limits)
    cluster = started(spec, steps=20000)
    for _ in range(2):
        cluster.run_until(lambda: len(cluster.alive) == 5)
        cluster.kill_agent(list(cluster.alive.values())[-1])
        cluster.run_until(lambda: len(cluster.alive) < 5 or cluster.machine.spares.retry_at)
    cluster.run_until(lambda: cluster.machine.spares.retry_at is not None)
    cluster.run_until(lambda: len(spares(cluster)) == 1, 2000.0)
    assert rounds(cluster) == 1


def test_a_master_that_returns_still_has_its_spares() -> None:
    cluster = with_spares()
    cluster.kill_master()
    cluster.run_until(lambda: not cluster.master_away and len(spares(cluster)) == 1)
    cluster.kill_agent(cluster.nodes[1])
    cluster.run_until(lambda: cluster.training and cluster.machine.rendezvous.round == 2, 30.0)
    assert len(told(cluster, events.SpareTakesPlace)) == 1


def test_a_master_without_its_journal_finds_which_spare_has_taken_a_place() -> None:
    cluster = with_spares()
    spare = spares(cluster)[0]
    cluster.kill_agent(cluster.nodes[2])
    cluster.run_until(lambda: len(spares(cluster)) == 1 and spares(cluster)[0] is not spare)
    cluster.run_until(lambda: cluster.training)
    cluster.lose_disk()
    cluster.run_until(lambda: not cluster.master_away and cluster.machine.rendezvous.members != ())
    cluster.run(60.0)
    assert cluster.training
    assert cluster.machine.rendezvous.round == 2
    assert [n for n in spares(cluster) if n is not spare]
    assert cluster.machine.nodes[spare.machine.node_id].node_rank == 2


def test_a_spare_is_checked_beside_the_training_and_again_before_it_is_used() -> None:
    cluster = with_spares(spec=job(4, 4, managed=True, spares=1, node_check=True))
    spare = spares(cluster)[0].machine.node_id
    cluster.run_until(lambda: spare in cluster.machine.checks.passed)
    assert rounds(cluster) == 1
    assert cluster.training
    cluster.kill_agent(cluster.nodes[0])
    cluster.run_until(lambda: cluster.machine.rendezvous.collecting)
    cluster.run_until(lambda: cluster.machine.checks.run is not None)
    assert spare in cluster.machine.checks.run.offers
    cluster.run_until(lambda: cluster.training)
    assert spare in cluster.machine.rendezvous.members


def test_nodes_that_come_by_themselves_beyond_the_maximum_are_spares() -> None:
    cluster = started(job(4, 4), nodes=5, steps=1000)
    cluster.run_until(lambda: len(spares(cluster)) == 1)
    spare, victim = spares(cluster)[0], min(cluster.nodes, key=lambda n: n in spares(cluster))
    assert told(cluster, events.SpareReady) == [events.SpareReady(spare.machine.node_id)]
    cluster.kill_agent(victim)
    cluster.run_until(lambda: cluster.training and cluster.machine.rendezvous.round == 2, 30.0)
    taken = told(cluster, events.SpareTakesPlace)
    assert taken == [events.SpareTakesPlace(spare.machine.node_id, victim.machine.node_id)]
    assert not spares(cluster)


def test_the_number_is_chosen_from_the_rate_and_the_time_to_replace_a_node() -> None:
    """A day to replace one of 16 nodes makes one spare worth it; seconds make none."""
    patient = Limits(join_timeout=100_000.0)
    spec = job(16, 16, managed=True, auto_spares=True, limits=patient)
    for seconds, wanted in ((90.0, 0), (90_000.0, 1)):
        machine, said = JobMachine(), []
        machine.handle(inputs.Submitted(spec), 0.0)
        for node in range(16):
            said += machine.handle(Hello(f"agent {node}", node), seconds)
            machine.validate()
        assert machine.scaling.spares == wanted
        decided = [
            c.body for c in said if isinstance(getattr(c, "body", None), events.SparesDecided)
        ]
        assert len(decided) == wanted
    assert decided[0].sentence() == (
        "The job will have 1 spare, not 0: 0.0023 failures per node and day, and 90000 s to replace one of "
        "16 nodes."
    )
    assert machine.nodes[16].node_rank == FIRST_SPARE
    due = machine.deadline()
    assert due is not None  # it is reviewed even if nothing happens


def inject(cluster: Cluster, rng: random.Random) -> None:
    """One fault of any kind."""
    alive = list(cluster.alive.values())
    match rng.randrange(6):
        case 0 | 1:
            cluster.kill_agent(rng.choice(alive))
        case 2:
            cluster.kill_worker(rng.choice(alive))
        case 3:
            cluster.disconnect(rng.choice(alive), rng.uniform(0.0, 6.0))
        case 4:
            cluster.kill_master(rng.uniform(0.1, 3.0), after_commands=rng.choice((None, 0, 1, 3)))
        case 5:
            cluster.break_device(rng.choice(alive))


def churn(seed: int) -> None:
    """A job with spares under faults at random times: it ends well, and each state on the way is valid."""
    rng = random.Random(seed)
    least = rng.choice((2, 4))
    managed = rng.random() < 0.8
    count = rng.randint(1, 3) if managed else 0
    spec = job(least, 4, managed=managed, node_check=rng.random() < 0.5, spares=count)
    delays = Delays(launch=(1.0, rng.choice((5.0, 100.0))), revive=(1.0, 60.0))
    cluster = Cluster(
        spec, nodes=0 if spec.managed_nodes else 6, steps=600, seed=seed, delays=delays
    )
    for _ in range(12):
        cluster.run(rng.choice((0.2, 2.0, 20.0)))
        if cluster.machine.outcome is None and cluster.alive:
            inject(cluster, rng)
    assert cluster.finish().exit_code == ExitCode.SUCCESS, cluster.describe()
    final = [n for n in cluster.machine.nodes.values() if n.status is NodeStatus.RUNNING]
    assert not final


@pytest.mark.parametrize("part", range(2))
def test_faults_at_random(part: int) -> None:
    for seed in range(part * 5, part * 5 + 5):
        churn(seed)


def test_a_job_waits_for_lost_nodes_that_may_return_although_another_one_is_left_out() -> None:
    """Six nodes that come by themselves, of which four are needed; three are lost when the check names a fourth."""
    churn(1331)


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(20))
def test_faults_at_random_in_1000_jobs(block: int) -> None:
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        churn(seed)
