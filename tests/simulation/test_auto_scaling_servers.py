"""Jobs that find their numbers of workers and of parameter servers, among real machines on a virtual clock."""

import pytest

from dlrover.master.machine import inputs
from dlrover.master.machine.scaling.autoscale import MOST_CHANGES
from dlrover.spec import events
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.measurements import NodeUsage
from dlrover.spec.node import Size
from dlrover.spec.plan import ScaleKind
from tests.simulation.autoscaled import LIMITS, NOISE, WITHIN, settled, told
from tests.simulation.cluster import Cluster

pytest.importorskip("scipy")

MOST = Size(6, 4)


def queue(compute: float, service: float):
    """A worker computes, then visits each server for an equal part of its service: mean value analysis."""

    def step(size: Size) -> float:
        waiting, each = [0.0] * size.servers, service / size.servers
        for workers in range(1, size.workers + 1):
            times = [each * (1 + queued) for queued in waiting]
            rate = workers / (compute + sum(times))
            waiting = [rate * time for time in times]
        return size.workers / rate

    return step


def published(each: float, load: float, split: float):
    """The form of DLRover-RM, with the cores of all nodes alike."""
    return lambda size: each + load * size.workers / size.servers + split / size.servers


LAWS = {
    "workers pay": queue(0.2, 0.01),
    "both pay": queue(0.1, 0.05),
    "servers pay": queue(0.05, 0.1),
    "a lock": queue(0.01, 0.1),
    "nothing pays": lambda size: 0.05 + 0.15 * size.workers + 0.05 * size.servers,
    "published": published(0.1, 0.06, 0.05),
    "one server is enough": published(0.1, 0.01, 0.0),
    "a network that suffers": lambda size: 0.1 + 0.02 * sum(size) + 0.05 * size.workers / size[1],
}


def worth(law, size: Size) -> float:
    return size.workers / law(size) / size.nodes ** Limits().autoscale_cost


def cluster_of(law, *, seed: int, workers: int = 1, servers: int = 1, **options) -> Cluster:
    fields = {"min_nodes": 1, "max_nodes": MOST.workers, "max_servers": MOST.servers}
    job = JobSpec(
        name="served",
        min_servers=1,
        managed_nodes=workers,
        servers=servers,
        auto_scale=True,
        limits=LIMITS,
        **(fields | options),
    )
    cluster = Cluster(job, nproc=1, steps=100_000, seed=seed, validate_every=7)
    cluster.program.served_law = law
    cluster.program.noise = NOISE
    return cluster


def size(cluster: Cluster) -> Size:
    return cluster.machine.rendezvous.size


@pytest.mark.parametrize("name", LAWS)
def test_a_job_reaches_the_best_size_from_one_worker_and_one_server(name):
    law = LAWS[name]
    cluster = cluster_of(law, seed=1)
    cluster.run_until(lambda: settled(cluster), 3600)
    sizes = [Size(w, p) for w in range(1, 7) for p in range(1, 5)]
    best = max(sizes, key=lambda each: worth(law, each))
    assert worth(law, size(cluster)) >= WITHIN * worth(law, best), (size(cluster), best)
    assert cluster.machine.restarts.count == 0
    plans = told(cluster, events.PlanMade)
    assert len(plans) <= MOST_CHANGES
    assert all(plan.reason and plan.effect is not None for plan in plans)
    assert len(told(cluster, events.PlanMeasured)) == len(plans)


def test_what_has_become_useless_is_given_back():
    """Workers compute for longer by now, and the servers idle."""
    cluster = cluster_of(LAWS["servers pay"], seed=2)
    cluster.run_until(lambda: settled(cluster), 3600)
    assert size(cluster).servers == MOST.servers
    cluster.program.served_law = queue(0.4, 0.01)
    cluster.run(1800)
    assert settled(cluster)
    assert size(cluster).servers == 1
    assert len(cluster.alive) == size(cluster).nodes


@pytest.mark.parametrize("strike", ["kill_agent", "kill_master"])
def test_a_fault_within_each_change_does_not_keep_it_from_the_best_size(strike):
    law = LAWS["both pay"]
    cluster = cluster_of(law, seed=3)
    struck: set[int] = set()

    def strike_once() -> bool:
        change = cluster.machine.autoscaling.change
        if change is not None and change.number not in struck and not cluster.master_away:
            struck.add(change.number)
            victim = list(cluster.alive.values())[-1]
            fault = getattr(cluster, strike)
            cluster.time.after((0.0, 4.0), fault, victim if strike == "kill_agent" else 2.0)
        return settled(cluster) and not cluster.master_away

    cluster.run_until(strike_once, 7200)
    assert struck
    assert worth(law, size(cluster)) >= WITHIN * worth(law, MOST)
    assert cluster.machine.restarts.user_restarts == 0


def test_a_users_number_of_servers_is_kept_and_the_workers_are_still_chosen():
    cluster = cluster_of(LAWS["both pay"], seed=4)
    cluster.run_until(lambda: cluster.machine.autoscaling.made == 1, 600)
    cluster.scale(2, role="ps")
    cluster.run_until(lambda: settled(cluster) and size(cluster).servers == 2, 3600)
    assert size(cluster).workers > 2
    assert not told(cluster, events.AutoScalingEnded)
    cluster.scale(3)
    cluster.run(600)
    assert size(cluster) == (3, 2)
    ended = told(cluster, events.AutoScalingEnded)
    assert [body.reason for body in ended] == ["a user requested 3 nodes"]


class Hot:
    """A job of three workers and two servers whose first server does most of the work until something is done."""

    def __init__(self, shares: tuple[float, float], **options) -> None:
        self.relieved = False
        self.shares = shares
        fixed = {"max_nodes": 3, "min_nodes": 3, "max_servers": 3}
        self.cluster = cluster_of(self.step, seed=5, workers=3, servers=2, **(fixed | options))
        self.cluster.program.usage = self.usage
        self.rounds = 0

    def step(self, size: Size) -> float:
        relieved = 0.2 if self.relieved else 0.4
        return {1: 1.0, 2: relieved, 3: 0.95 * relieved}[size.servers]

    def usage(self, node) -> NodeUsage:
        if not node.serves:
            return NodeUsage(0.5, 1 << 30, 8 << 30, 2.0)
        world = node.machine.world
        known = self.cluster.machine.nodes[node.machine.node_id]
        used = self.shares[(world.first_rank - world.workers) % 2]
        level = sum(self.shares) / 2 if self.relieved else used
        return NodeUsage(level, 1 << 30, 8 << 30, 2.0 * known.cpu_factor)

    def made(self, kind: ScaleKind) -> list[events.PlanMade]:
        return [plan for plan in told(self.cluster, events.PlanMade) if plan.kind is kind]


def test_uneven_servers_get_a_new_round_in_which_the_program_divides_its_parameters():
    hot = Hot((1.5, 0.2))
    cluster = hot.cluster
    cluster.run_until(lambda: hot.made(ScaleKind.REBALANCE), 600)
    hot.relieved = True
    cluster.run(200)
    (plan,) = hot.made(ScaleKind.REBALANCE)
    assert "times the mean load of the servers" in plan.reason
    measured = {p.number: p for p in told(cluster, events.PlanMeasured)}[plan.number]
    assert not measured.short
    assert size(cluster) == (3, 2)
    assert cluster.machine.restarts.count == 0


def test_a_hot_server_that_cannot_be_relieved_moves_to_more_cores_beside_the_training():
    hot = Hot((1.9, 0.2), grows_cpu=True)
    cluster = hot.cluster
    cluster.run_until(lambda: hot.made(ScaleKind.MIGRATE), 1200)
    assert len(hot.made(ScaleKind.REBALANCE)) == 1, "it was tried, and did not help"
    rounds = len(told(cluster, events.RoundOpened))
    cluster.run_until(lambda: len(told(cluster, events.RoundOpened)) > rounds, 120)
    hot.relieved = True
    cluster.run(200)
    servers = [
        n for n in cluster.machine.rendezvous.members if n in cluster.machine.rendezvous.servers
    ]
    assert sorted(cluster.machine.nodes[n].cpu_factor for n in servers) == [1.0, 1.5]
    (plan,) = hot.made(ScaleKind.MIGRATE)
    assert plan.reason.startswith("hot: ")
    measured = {p.number: p for p in told(cluster, events.PlanMeasured)}[plan.number]
    assert measured.throughput > 1.5 * plan.effect.before
    assert not measured.short
    assert cluster.machine.restarts.count == 0


def test_if_all_servers_are_hot_there_will_be_one_more():
    hot = Hot((1.9, 1.9))
    cluster = hot.cluster
    cluster.program.served_law = lambda size: 0.6 / size.servers
    cluster.master.scaler.question = lambda _now: None  # it would find that by itself
    cluster.run_until(lambda: size(cluster).servers == 3, 1200)
    assert any(
        "use more than 80% of their cores" in p.reason for p in told(cluster, events.PlanMade)
    )


def test_a_slow_worker_of_servers_is_replaced_if_its_own_share_is_worth_it():
    cluster = cluster_of(LAWS["workers pay"], seed=6, workers=3, max_nodes=3, max_servers=1)
    cluster.run_until(lambda: settled(cluster), 3600)
    machine = cluster.machine
    node = next(
        n for n in reversed(machine.rendezvous.members) if n not in machine.rendezvous.servers
    )
    slow = events.SlowRank(1, node, 3.0, "compute")
    cluster._submit(inputs.RankSpeed(machine.rendezvous.round, slow))
    cluster.run(120)
    kinds = [plan.kind for plan in told(cluster, events.PlanMade)]
    assert kinds.count(ScaleKind.REPLACE) == 1
    assert node not in cluster.machine.rendezvous.members
