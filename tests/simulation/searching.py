"""The search for the best size alone: the auto-scaler's memory and the planner, without a cluster or a clock."""

import random
from collections.abc import Callable
from typing import NamedTuple

from dlrover.master.machine.scaling.autoscale import AutoScaling
from dlrover.master.machine.scaling.planner import decide
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.measurements import ModelProfile, SpeedSample
from dlrover.spec.node import Size
from dlrover.spec.plan import ScaleDecision, ScaleStage

Law = Callable[[int], float]
"""Steps per second of all workers together, by the number of nodes."""
SPREAD = 0.02
"""Relative spread of what a window measures."""
WINDOWS = 200
"""Measured until a search must be over."""


class Search:
    """One job with one worker on each node."""

    def __init__(self, law: Law, most: int, start: int = 1, *, seed: int = 0) -> None:
        job = JobSpec(name="job", min_nodes=1, max_nodes=most, managed_nodes=start, auto_scale=True)
        self.law, self.most, self.nodes = law, most, start
        self.machine = AutoScaling(job)
        self.changes = 0
        self.visited = [start]
        self.spread = SPREAD
        self.compute: float | None = None
        self._draw = random.Random(seed)
        self._now, self._round = 0.0, 1

    def settle(self) -> None:
        """Go on until the search is over."""
        for _ in range(WINDOWS):
            self.window()
            if self.machine.stage is ScaleStage.RUNNING and self.machine.change is None:
                return
        raise AssertionError(f"no end after {WINDOWS} windows: {self.visited}")

    def window(self) -> None:
        """Measure once, and do what follows from it."""
        self._now += 30.0
        speed = self.law(self.nodes) * self._draw.lognormvariate(0.0, self.spread)
        sample = SpeedSample(
            nodes=self.nodes,
            replicas=self.nodes,
            step_seconds=self.nodes / speed,
            steps=20,
            compute_seconds=self.compute if self.nodes > 1 else None,
        )
        machine = self.machine
        _, back = machine.measured(self._round, sample, ModelProfile(), self._now)
        self._follow(back)
        if machine.due(self._now):
            decision = decide(machine.question())
            machine.planned(decision, self._now)
            self._follow(decision)
        machine.validate()

    def _follow(self, decision: ScaleDecision | None) -> None:
        if decision is None:
            return
        self.nodes = decision.nodes
        self.visited.append(self.nodes)
        self.changes += 1
        self._round += 1
        self.machine.world_formed()

    def worth(self, nodes: int) -> float:
        """What the search makes as large as it can."""
        return self.law(nodes) / nodes ** Limits().autoscale_cost

    @property
    def best(self) -> int:
        """The best size, by looking at all of them."""
        return max(range(1, self.most + 1), key=self.worth)

    @property
    def reached(self) -> float:
        """The present size's share of the best one's worth."""
        return self.worth(self.nodes) / self.worth(self.best)


def table(*speeds: float) -> Law:
    """A law by its speeds on 1, 2, ... nodes."""
    return lambda nodes: speeds[nodes - 1]


class Drawn(NamedTuple):
    """A random law."""

    kind: str
    speed: Law
    most: int
    """Nodes that the job may have."""
    compute: float | None
    """Seconds that a node computes in each step, where that is measured."""


def drawn(draw: random.Random) -> Drawn:
    """A law of a random kind."""
    most = draw.choice((2, 3, 4, 6, 8, 12, 16, 24, 32))
    kind = draw.choice(("ring", "saturating", "cliff", "uneven", "any"))
    compute = 0.1
    ring = _ring(draw, compute)
    if kind == "ring":
        return Drawn(kind, ring, most, compute)
    if kind == "cliff":
        edge, drop = draw.randint(1, most), draw.uniform(0.2, 0.9)
        return Drawn(kind, lambda n: ring(n) * (1.0 if n <= edge else drop), most, compute)
    if kind == "uneven":
        factors = [draw.uniform(0.8, 1.0) for _ in range(most)]
        return Drawn(kind, lambda n: ring(n) * factors[n - 1], most, compute)
    if kind == "saturating":
        full, slope = draw.uniform(0.5, 1.2 * most), draw.uniform(0.0, 0.3)
        return Drawn(
            kind, lambda n: 10 * min(n, full) / (1 + slope * max(0.0, n - full)), most, None
        )
    speeds = [10.0]
    for n in range(2, most + 1):
        speeds.append(speeds[-1] * (n / (n - 1)) ** draw.uniform(-1.5, 1.0))
    return Drawn(kind, table(*speeds), most, None)


def _ring(draw: random.Random, compute: float) -> Law:
    network = compute * 10 ** draw.uniform(-2.5, 1.0)
    latency = network * 10 ** draw.uniform(-3.0, -0.5)
    overlap = draw.uniform(1.0, 5.0)

    def speed(nodes: int) -> float:
        if nodes == 1:
            return 1 / compute
        exchange = network * (0.5 + (nodes - 1) / nodes) + latency * (nodes - 2)
        return float(nodes / (compute**overlap + exchange**overlap) ** (1 / overlap))

    return speed


class ServerSearch(NamedTuple):
    """A random law of a job with parameter servers, and where its search begins."""

    kind: str
    speed: Callable[[Size], float]
    """Steps per second of all workers together."""
    most: Size
    start: Size

    def reached(self, seed: int) -> tuple[float, list[Size]]:
        """The share of the best size's worth that a search reaches, and the sizes on its way."""
        job = JobSpec(
            name="job", min_nodes=1, max_nodes=self.most.workers, managed_nodes=self.start.workers,
            servers=self.start.servers, min_servers=1, max_servers=self.most.servers, auto_scale=True,
        )  # fmt: skip
        machine, draw = AutoScaling(job), random.Random(seed)
        size, visited = self.start, [self.start]
        for window in range(WINDOWS):
            speed = self.speed(size) * draw.lognormvariate(0.0, SPREAD)
            sample = SpeedSample(
                nodes=size.workers, replicas=size.workers, step_seconds=size.workers / speed, steps=20,
                servers=size.servers,
            )  # fmt: skip
            now = 30.0 * window
            _, decision = machine.measured(len(visited), sample, ModelProfile(), now)
            if decision is None and machine.due(now):
                decision = decide(machine.question())
                machine.planned(decision, now)
            machine.validate()
            if decision is not None:
                size = decision.size
                visited.append(size)
                machine.world_formed()
            elif machine.stage is ScaleStage.RUNNING and machine.change is None:
                return self.worth(size) / max(map(self.worth, self.sizes())), visited
        raise AssertionError(f"no end after {WINDOWS} windows: {visited}")

    def sizes(self) -> list[Size]:
        """All that the job may have."""
        servers = range(1, self.most.servers + 1)
        return [Size(w, p) for w in range(1, self.most.workers + 1) for p in servers]

    def worth(self, size: Size) -> float:
        """What the search makes as large as it can."""
        return self.speed(size) / size.nodes ** Limits().autoscale_cost


def drawn_with_servers(draw: random.Random) -> ServerSearch:
    """A law of a random kind: smooth, with a cliff, uneven, or with servers that share a lock."""
    most = Size(draw.choice((4, 6, 8, 12)), draw.choice((2, 4, 6)))
    kind = draw.choice(("smooth", "cliff", "uneven", "lock"))
    compute = 0.1
    load, split, latency = (compute * 10 ** draw.uniform(-2.0, 0.5) for _ in range(3))

    def smooth(size: Size) -> float:
        step = compute + load * size.workers / size.servers + split / size.servers + 0.1 * latency
        return float(size.workers / step)

    edge = Size(draw.randint(1, most.workers), draw.randint(1, most.servers))
    drop, limit = draw.uniform(0.3, 0.9), draw.uniform(5.0, 60.0)
    factors = {
        Size(w, p): draw.uniform(0.8, 1.0)
        for w in range(1, most.workers + 1)
        for p in range(1, most.servers + 1)
    }
    speeds = {
        "smooth": smooth,
        "cliff": lambda s: smooth(s) * (drop if s.workers > edge.workers or s.servers > edge.servers else 1.0),
        "uneven": lambda s: smooth(s) * factors[s],
        "lock": lambda s: 1 / (1 / smooth(s) + 1 / limit),
    }  # fmt: skip
    starts = (Size(1, 1), most, Size(draw.randint(1, most.workers), draw.randint(1, most.servers)))
    return ServerSearch(kind, speeds[kind], most, draw.choice(starts))
