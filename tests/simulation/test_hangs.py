"""Ten thousand healthy hours without a false alarm; every injected hang and every slow rank is found."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from dlrover.master.machine.watches.hangs import (
    Hang,
    HangDetector,
    NodeActivities,
    SampleWorkers,
    Tick,
    WorkersSampled,
    WorldFormed,
)
from dlrover.master.machine.watches.slow import SpeedWatch
from dlrover.spec.activity import Activity
from dlrover.spec.events import SlowRank
from dlrover.spec.job import Limits
from tests.simulation.activities import SimulatedTraining

HOURS = 100
HEARTBEAT = 60.0
"""Coarser than by default: what is seen less often is more easily mistaken."""


class Watched:
    """A training, and the detectors that watch it."""

    def __init__(self, seed: int, ranks: int = 4, limits: Limits | None = None) -> None:
        self.training = SimulatedTraining(seed, ranks)
        self.detector = HangDetector(limits or Limits())
        self.speed = SpeedWatch(limits or Limits(slow_rank_window=300.0))
        self.detector.handle(WorldFormed(1, ranks, True), 0.0)
        self.now = 0.0
        self.found: list[Hang] = []
        self.slow: list[object] = []
        self.looks = 0

    def run(self, seconds: float, heartbeat: float) -> None:
        until = self.now + seconds
        nodes = {rank: rank // 2 for rank in range(self.training.ranks)}
        while self.now < until and not self.found:
            self.now += heartbeat
            workers = self.training.workers(self.now)
            self.detector.handle(NodeActivities(1, workers), self.now)
            self.slow += self.speed.compare(workers, nodes, self.now)
            while SampleWorkers(1) in (orders := self.detector.handle(Tick(), self.now)):
                assert len(orders) == 1
                self._look()

    def _look(self) -> None:
        """The nodes look twice, unless the suspicion ends."""
        self.looks += 1
        self.now += 1.0
        self._take(
            self.detector.handle(WorkersSampled(1, self.training.evidence(self.now)), self.now)
        )
        self.now += self.detector.limits.hang_sample_gap

    def _take(self, orders: list) -> None:
        self.found += [order for order in orders if isinstance(order, Hang)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 100), marks=pytest.mark.heavy)], ids=str
)
def test_thousands_of_healthy_hours(seeds: range) -> None:
    looks = 0
    for seed in seeds:
        job = Watched(seed)
        job.run(HOURS * 3600, HEARTBEAT)
        assert not job.found, f"seed {seed}: {job.found[0].hang.sentence()} {job.training.phase}"
        assert not job.slow, f"seed {seed}: {job.slow}"
        assert job.now >= HOURS * 3600
        looks += job.looks
    assert looks > 0  # something was suspicious, and the processes showed that it was not


def injected() -> Iterator[object]:
    draw = random.Random(1)
    kinds = [Activity.STEP, Activity.DATA, Activity.EVAL, Activity.CHECKPOINT, Activity.COMPILE]
    for seed in range(200):
        rank = draw.randrange(4) if seed % 5 else None
        kind = draw.choice(kinds) if rank is not None else Activity.STEP
        yield pytest.param(seed, rank, kind, draw.uniform(4, 20) * 3600, id=f"{seed}-{kind.name}")


@pytest.mark.parametrize(("seed", "rank", "kind", "at"), list(injected()))
def test_every_injected_hang_is_found(
    seed: int, rank: int | None, kind: Activity, at: float
) -> None:
    job = Watched(1000 + seed)
    job.run(at, 120.0)
    job.training.hang(job.now, rank, kind)
    hung_at = job.now
    job.run(15.0, 15.0)
    limit = max(job.detector.limit(k) for k in (kind, Activity.STEP)) * job.detector.patience
    job.run(limit + 300, 15.0)
    assert job.found
    hang = job.found[0].hang
    assert hang.ranks == (() if rank is None else (rank,))
    waits = "all_reduce (distributed_c10d.py:2800), called by main (train.py:9)"
    assert hang.place == (waits if rank is None else f"do_{kind.name.lower()} (train.py:41)")
    assert job.now - hung_at < limit + 60


@pytest.mark.parametrize("seed", range(60))
def test_every_slow_rank_is_found(seed: int) -> None:
    draw = random.Random(seed)
    job = Watched(2000 + seed, ranks=draw.choice([2, 4, 16]))
    rank = draw.randrange(job.training.ranks)
    job.run(7200, 30.0)
    assert not job.slow
    factor = draw.uniform(1.3, 3.0)
    waits = draw.random() < 0.5
    job.training.factors[rank] = factor
    if waits:
        job.training.data_waits[rank] = 1 - 1 / factor
    job.run(12 * 3600, 30.0)
    (found,) = job.slow
    assert isinstance(found, SlowRank)
    assert (found.rank, found.node) == (rank, rank // 2)
    assert found.factor == pytest.approx(factor, rel=0.15)
    assert found.cause == ("data" if waits else "compute")
    assert not job.found
