"""Detection of ranks that hold up the others, by their own time per step relative to the median.

In synchronous training, the total time of a step is the same for all ranks, since the fast ones wait for the
slow ones. So the ranks are compared by their time without that wait. A rank is reported after several
consecutive slow windows, and recovers after as many normal ones.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover.master.machine.watches.hangs import is_another
from dlrover.spec.activity import Activity
from dlrover.spec.events import SlowRank, SlowRankRecovered
from dlrover.spec.job import Limits
from dlrover.spec.measurements import WorkerActivity

MIN_STEPS = 3
"""Minimum number of steps of every rank in a window for a comparison."""


class RankPace(NamedTuple):
    """Seconds per step of one rank within a window."""

    compute: float
    """Time without waiting for other ranks."""
    data: float
    """Time waiting for the next batch; part of ``compute``."""


@dataclass
class SpeedWatch:
    """Comparison of one job's ranks. Times are seconds."""

    limits: Limits = field(default_factory=Limits)
    #: report of each rank at the start of the window
    marks: dict[int, WorkerActivity] = field(default_factory=dict)
    began: float = 0.0
    #: consecutive slow windows of each rank that is not yet reported
    counts: dict[int, int] = field(default_factory=dict)
    #: consecutive normal windows of each reported rank
    slow: dict[int, int] = field(default_factory=dict)
    #: latest finding on each reported rank
    named: dict[int, SlowRank] = field(default_factory=dict)

    def begin(self) -> None:
        """Start over for a new world, whose ranks may be on other nodes."""
        self.marks.clear()
        self.counts.clear()
        self.slow.clear()
        self.named.clear()

    def compare(
        self, workers: Mapping[int, WorkerActivity], nodes: Mapping[int, int], now: float
    ) -> list[SlowRank | SlowRankRecovered]:
        """Compare the ranks if a window has passed; ``nodes`` maps each rank to its node."""
        if not self.limits.hang_detection:
            return []
        same = workers.keys() == self.marks.keys()
        if not same or any(is_another(self.marks[rank], one) for rank, one in workers.items()):
            self.marks, self.began = dict(workers), now
            return []
        if now - self.began < self.limits.slow_rank_window:
            return []
        paces = {rank: pace(self.marks[rank], worker) for rank, worker in workers.items()}
        known = {rank: found for rank, found in paces.items() if found is not None}
        if len(known) < len(paces):
            return []  # the window goes on
        self.marks, self.began = dict(workers), now
        return self._judge(known, nodes)

    def held_up(self, until: float) -> bool | None:
        """Return whether a rank was slow, but is not yet reported, up to a time; None until it is compared."""
        if self.counts or not self.limits.hang_detection:
            return bool(self.counts)
        return False if self.began >= until else None

    def _judge(
        self, paces: Mapping[int, RankPace], nodes: Mapping[int, int]
    ) -> list[SlowRank | SlowRankRecovered]:
        found: list[SlowRank | SlowRankRecovered] = []
        compute = sorted(p.compute for p in paces.values())
        data = sorted(p.data for p in paces.values())
        for rank, one in paces.items():
            usual = _median_without(compute, one.compute)
            factor = one.compute / usual if usual > 0 else 1.0
            if factor < self.limits.slow_rank_ratio:
                found += self._not_slow(rank, nodes[rank])
                continue
            waited = one.data - _median_without(data, one.data)
            cause = "data" if waited > (one.compute - usual) / 2 else "compute"
            found += self._is_slow(SlowRank(rank, nodes[rank], factor, cause))
        return found

    def _is_slow(self, this: SlowRank) -> list[SlowRank | SlowRankRecovered]:
        if this.rank in self.slow:
            self.slow[this.rank] = 0
            self.named[this.rank] = this
            return []
        self.counts[this.rank] = self.counts.get(this.rank, 0) + 1
        if self.counts[this.rank] < self.limits.slow_rank_windows:
            return []
        del self.counts[this.rank]
        self.slow[this.rank] = 0
        self.named[this.rank] = this
        return [this]

    def _not_slow(self, rank: int, node: int) -> list[SlowRank | SlowRankRecovered]:
        self.counts.pop(rank, None)
        if rank not in self.slow:
            return []
        self.slow[rank] += 1
        if self.slow[rank] < self.limits.slow_rank_windows:
            return []
        del self.slow[rank], self.named[rank]
        return [SlowRankRecovered(rank, node)]


def pace(before: WorkerActivity, now: WorkerActivity) -> RankPace | None:
    """Return a rank's seconds per step between two reports; None with too few steps."""
    steps = now.steps - before.steps
    if steps < MIN_STEPS or now.ended:
        return None
    data = now.seconds[Activity.DATA] - before.seconds[Activity.DATA]
    return RankPace((now.compute - before.compute) / steps, data / steps)


def _median_without(ordered: list[float], one: float) -> float:
    """Return the median of an ascending list without ``one``, its member; ``one`` if it is alone."""
    count = len(ordered) - 1
    if count < 1:
        return one
    position = bisect.bisect_left(ordered, one)

    def other(index: int) -> float:
        return ordered[index if index < position else index + 1]

    return (other((count - 1) // 2) + other(count // 2)) / 2
