"""Jobs that find their size by themselves, among real machines on a virtual clock."""

import pytest

from dlrover.master.machine import inputs
from dlrover.master.scaling.brainside import shape_of
from dlrover.master.views.status import size_of
from dlrover.spec import brain, events
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.node import LaunchNode
from dlrover.spec.plan import NodeGroup, ScaleKind
from tests.simulation.autoscaled import LIMITS, NOISE, WITHIN, settled, told
from tests.simulation.cluster import Cluster

pytest.importorskip("scipy")

COMPUTE = 0.1
LAWS = {
    "scales": lambda n: 0.1 + (0.02 + 0.002 * (n - 2) if n > 1 else 0),
    "two pay": lambda n: {1: 0.1, 2: 0.12}.get(n, 0.12 + 0.07 * (n - 2)),
    "one pays": lambda n: 0.1 if n == 1 else 0.25 + 0.02 * n,
    "saturates": lambda n: 0.1 + 0.02 * (n - 1),
    "cliff": lambda n: 0.1 if n <= 4 else 0.3,
}
MOST = 8


def worth(law, nodes: int) -> float:
    return nodes / law(nodes) / nodes ** Limits().autoscale_cost


def cluster_of(law, *, seed: int, start: int = 1, noise: float = NOISE, **options) -> Cluster:
    job = JobSpec(
        name="auto",
        min_nodes=1,
        max_nodes=MOST,
        managed_nodes=start,
        auto_scale=True,
        limits=LIMITS,
        **options,
    )
    cluster = Cluster(job, nproc=1, steps=100_000, seed=seed, validate_every=7)
    cluster.program.law = lambda n: (law(n), COMPUTE)
    cluster.program.noise = noise
    return cluster


def size(cluster: Cluster) -> int:
    return len(cluster.machine.rendezvous.members)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", LAWS)
def test_a_job_reaches_the_best_size_from_one_node(name, seed):
    law = LAWS[name]
    cluster = cluster_of(law, seed=seed)
    cluster.run_until(lambda: settled(cluster), 3600)
    best = max(range(1, MOST + 1), key=lambda n: worth(law, n))
    assert worth(law, size(cluster)) >= WITHIN * worth(law, best), cluster.describe()
    assert cluster.machine.restarts.count == 0
    plans = told(cluster, events.PlanMade)
    assert all(plan.reason and plan.effect is not None for plan in plans)
    assert len(told(cluster, events.PlanMeasured)) == len(plans)


def measured(cluster: Cluster) -> brain.Similar:
    """What the Brain would keep of a job."""
    known = cluster.machine.autoscaling.samples.values()
    samples = tuple(
        brain.Sample(
            shape=shape_of(sample, NodeGroup(count=1)),
            throughput=sample.throughput,
            compute_seconds=sample.compute_seconds,
        )
        for of_size in known
        for sample in of_size
    )
    return brain.Similar(name="past", similarity=1.0, samples=samples)


@pytest.mark.parametrize("start", [1, 4])
@pytest.mark.parametrize("name", LAWS)
def test_a_known_program_needs_fewer_trials(name, start):
    law = LAWS[name]
    past = cluster_of(law, seed=11, start=start)
    past.run_until(lambda: settled(past), 3600)
    again = cluster_of(law, seed=12, start=start)
    again.similar = measured(past)
    again.run_until(lambda: settled(again), 3600)
    before, now = (told(cluster, events.PlanMade) for cluster in (past, again))
    assert len(now) <= min(len(before), 1)
    assert all("by the similar job past" in plan.reason for plan in now)
    best = max(range(1, MOST + 1), key=lambda n: worth(law, n))
    assert worth(law, size(again)) >= WITHIN * worth(law, best), again.describe()


def test_a_past_job_that_only_looks_alike_is_not_believed():
    past = cluster_of(LAWS["one pays"], seed=13)
    past.run_until(lambda: settled(past), 3600)
    cluster = cluster_of(lambda n: 3 * LAWS["scales"](n), seed=14)
    cluster.similar = measured(past)
    cluster.run_until(lambda: settled(cluster), 3600)
    assert size(cluster) > MOST / 2
    assert not any("similar" in plan.reason for plan in told(cluster, events.PlanMade))


FAULTS = {
    "a worker is killed": lambda cluster, node: cluster.kill_worker(node),
    "an agent is killed": lambda cluster, node: cluster.kill_agent(node),
    "a connection breaks": lambda cluster, node: cluster.disconnect(node, 1.0),
    "the master is killed": lambda cluster, _node: cluster.kill_master(2.0),
    "the master dies half way": lambda cluster, _node: cluster.kill_master(2.0, after_commands=1),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["scales", "two pay"])
def test_a_fault_within_each_change_does_not_keep_it_from_the_best_size(name, fault):
    """A master that comes back finds the plan in its journal; `Cluster` compares all of its state."""
    law = LAWS[name]
    cluster = cluster_of(law, seed=3)
    struck: set[int] = set()

    def strike_once() -> bool:
        change = cluster.machine.autoscaling.change
        if change is not None and change.number not in struck and not cluster.master_away:
            struck.add(change.number)
            alive = list(cluster.alive.values())
            victim = alive[-1]
            cluster.time.after((0.0, 4.0), FAULTS[fault], cluster, victim)
        return settled(cluster) and not cluster.master_away

    cluster.run_until(strike_once, 7200)
    assert struck
    best = max(range(1, MOST + 1), key=lambda n: worth(law, n))
    cluster.run(60.0)
    assert worth(law, size(cluster)) >= WITHIN * worth(law, best), cluster.describe()
    assert cluster.machine.restarts.user_restarts == 0


def test_a_replaced_master_takes_back_what_does_not_pay():
    """It dies when the nodes of a plan train already, and finds in its journal what was promised."""
    cluster = cluster_of(LAWS["one pays"], seed=1)
    cluster.run_until(lambda: size(cluster) == 2 and cluster.training, 600)
    change = cluster.machine.autoscaling.change
    assert change is not None
    cluster.kill_master(5.0)
    cluster.run_until(lambda: settled(cluster) and not cluster.master_away, 3600)
    assert size(cluster) == 1
    outcomes = {plan.number: plan for plan in told(cluster, events.PlanMeasured)}
    assert outcomes[change.number].short


def test_a_job_says_how_many_nodes_of_how_many_it_has():
    cluster = cluster_of(LAWS["two pay"], seed=0)
    cluster.run_until(lambda: cluster.machine.autoscaling.change is not None, 600)
    planned = "1 of 1:8 nodes, auto-scaling: plan 1 (measure), 1 -> 2 nodes"
    assert size_of(cluster.machine) == planned
    cluster.run_until(lambda: settled(cluster), 3600)
    assert size_of(cluster.machine) == "2 of 1:8 nodes, auto-scaling: running"
    cluster.scale(3)
    cluster.run(60.0)
    assert size_of(cluster.machine) == "3 of 1:8 nodes"
    fixed = Cluster(JobSpec(name="fixed", min_nodes=2, max_nodes=2), nodes=2, steps=10)
    assert size_of(fixed.machine) == ""


def test_no_size_is_tried_while_a_rank_may_be_slow():
    cluster = cluster_of(LAWS["scales"], seed=0)
    suspects = [True]
    cluster.master.scaler._held_up = lambda _: bool(suspects)
    cluster.run(200.0)
    assert cluster.machine.autoscaling.latest is not None
    assert not told(cluster, events.PlanMade)
    samples = [e for _, e in cluster.journal if isinstance(e, inputs.SpeedMeasured)]
    assert samples
    assert all(sample.held_up for sample in samples)
    suspects.clear()
    cluster.run(60.0)
    assert told(cluster, events.PlanMade)


def test_nodes_that_never_come_are_called_off_and_not_asked_for_again():
    """The platform starts no more than two nodes."""
    cluster = cluster_of(LAWS["scales"], seed=2)
    platform = cluster.process.platform
    launch = platform.launch

    def launch_few(node: LaunchNode) -> str:
        if node.node_rank < 2:
            return launch(node)
        platform.watched[f"node {node.node_id}"] = node.node_id
        return f"node {node.node_id}"

    platform.launch = launch_few
    cluster.run_until(lambda: settled(cluster), 7200)
    assert size(cluster) == 2
    assert "autoscale_patience" in told(cluster, events.PlanDropped)[0].reason
    assert len(cluster.alive) == 2
    cluster.run(600)
    assert size(cluster) == 2


def test_a_size_at_which_the_program_fails_is_left_and_costs_no_restart():
    """Fewer than eight nodes have not enough memory."""
    cluster = cluster_of(lambda n: 0.1 + 0.05 * (n - 1), seed=1, start=8)
    struck: set[int] = set()
    message = "CUDA out of memory. Tried to allocate 20.00 GiB"

    def too_small() -> bool:
        change = cluster.machine.autoscaling.change
        small = size(cluster) < 8 and cluster.training and change is not None
        if small and change.number not in struck:
            struck.add(change.number)
            victim = next(iter(cluster.alive.values()))
            victim.workers.fail(
                FailureKind.EXCEPTION, exception="torch.OutOfMemoryError", message=message
            )
        return cluster.machine.outcome is not None or settled(cluster)

    cluster.run_until(too_small, 7200)
    assert struck
    assert cluster.machine.outcome is None
    assert size(cluster) == 8
    assert cluster.machine.restarts.user_restarts == 0
    assert 4 not in cluster.machine.autoscaling.sizes.workers()
    assert "the program failed with 4 nodes" in told(cluster, events.PlanDropped)[0].reason
    tried = [plan.nodes for plan in told(cluster, events.PlanMade) if plan.nodes < 8]
    assert tried[0] >= 4


def test_a_users_number_of_nodes_ends_auto_scaling():
    cluster = cluster_of(LAWS["scales"], seed=4)
    cluster.run_until(lambda: cluster.machine.autoscaling.made == 1, 600)
    cluster.scale(3)
    cluster.run(1800)
    assert size(cluster) == 3
    ended = told(cluster, events.AutoScalingEnded)
    assert [body.reason for body in ended] == ["a user requested 3 nodes"]
    assert len(told(cluster, events.PlanMade)) == 1


def test_a_fixed_number_of_nodes_is_never_changed():
    job = JobSpec(name="fixed", min_nodes=2, max_nodes=2, managed_nodes=2, auto_scale=True)
    cluster = Cluster(job, nproc=1, steps=100_000, seed=0)
    cluster.program.law = lambda _: (COMPUTE, COMPUTE)
    cluster.run(300)
    assert not told(cluster, events.PlanMade)


def test_a_job_that_becomes_faster_with_nodes_later_on_grows_then():
    """Its computation becomes five times as long: what was measured before says nothing any more."""
    law = LAWS["one pays"]
    cluster = cluster_of(law, seed=5)
    cluster.run_until(lambda: settled(cluster) and size(cluster) == 1, 3600)
    cluster.program.law = lambda n: (0.5 + law(n) - 0.1, 0.5)
    cluster.run(900)
    assert size(cluster) > 2


def test_a_world_has_a_multiple_of_the_unit():
    cluster = cluster_of(LAWS["scales"], seed=6, start=2, node_unit=2)
    cluster.run_until(lambda: settled(cluster), 3600)
    sizes = {body.nodes for body in told(cluster, events.PlanMade)}
    assert sizes
    assert all(nodes % 2 == 0 for nodes in sizes)
    assert size(cluster) == MOST


def test_a_slow_node_is_replaced_and_the_job_is_faster():
    law = LAWS["scales"]
    cluster = cluster_of(law, seed=7, start=2)
    cluster.run_until(lambda: settled(cluster), 3600)
    node = cluster.machine.rendezvous.members[-1]
    victim = cluster.machine.nodes[node].handle
    cluster.program.law = lambda n: (law(n) + (0.08 if victim in cluster.alive else 0), COMPUTE)
    cluster.run(60.0)
    before = cluster.machine.rendezvous.round
    rank = MOST - 1
    cluster._submit(inputs.RankSpeed(before, events.SlowRank(rank, node, 1.8, "compute")))
    cluster.run_until(
        lambda: told(cluster, events.PlanMeasured)[-1].nodes == MOST and settled(cluster), 900
    )
    assert victim not in cluster.alive
    assert size(cluster) == MOST
    made = [plan for plan in told(cluster, events.PlanMade) if plan.kind is ScaleKind.REPLACE]
    assert [(plan.before, plan.nodes) for plan in made] == [(MOST, MOST)]
    measured = {plan.number: plan for plan in told(cluster, events.PlanMeasured)}[made[0].number]
    assert measured.throughput > 1.4 * made[0].effect.before
    assert (cluster.machine.restarts.count, cluster.machine.incident) == (0, None)


@pytest.mark.parametrize("grows", [True, False])
def test_a_node_gets_more_memory_before_it_runs_out_where_the_platform_can_do_that(grows):
    cluster = cluster_of(LAWS["one pays"], seed=9, start=2, grows_memory=grows)
    cluster.run_until(lambda: settled(cluster) and size(cluster) == 1, 3600)
    machine = cluster.machine
    node = machine.rendezvous.members[0]
    forecast = inputs.MemoryForecast(
        machine.rendezvous.round, events.MemoryGrows(node, 24 << 30, 16 << 30, 1800.0)
    )
    cluster._submit(forecast)
    cluster.run(120.0)
    assert cluster.training
    (said,) = told(cluster, events.MemoryGrows)
    assert said.ordered == grows
    (now_there,) = cluster.machine.rendezvous.members
    assert (now_there != node) == grows
    assert cluster.machine.nodes[now_there].memory_factor == (1.5 if grows else 1.0)
    assert (cluster.machine.restarts.count, cluster.machine.incident) == (0, None)


def test_a_node_whose_replacement_does_not_help_is_the_last_one():
    """It is the data that make a rank slow, not its node."""
    law = LAWS["scales"]
    cluster = cluster_of(law, seed=8, start=2)
    cluster.run_until(lambda: settled(cluster), 3600)
    for _ in range(3):
        machine = cluster.machine
        node = machine.rendezvous.members[-1]
        slow = events.SlowRank(MOST - 1, node, 1.8, "compute")
        cluster._submit(inputs.RankSpeed(machine.rendezvous.round, slow))
        cluster.run(120.0)
    made = [plan for plan in told(cluster, events.PlanMade) if plan.kind is ScaleKind.REPLACE]
    assert len(made) == 1
    assert told(cluster, events.PlanMeasured)[-1].short
    assert size(cluster) == MOST
