"""Which ranks hold up the others: their own time for a step, beside the median of all.

The time of a step as such is the same for all ranks of a synchronous training, since the fast ones wait
for the slow ones. Compared is what each rank takes without that wait. A rank is named after several
windows in a row, and cleared after as many.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover.spec.activities import Activity
from dlrover.spec.activity import WorkerActivity
from dlrover.spec.events import SlowRank, SlowRankRecovered
from dlrover.spec.job import Limits

MIN_STEPS = 3
"""Steps in a window that every rank must have made for a comparison."""


class Pace(NamedTuple):
    """One rank's seconds per step within a window."""

    compute: float
    """Without waiting for other ranks."""
    data: float
    """Waiting for the next batch, which is part of it."""


@dataclass
class SpeedWatch:
    """One job's comparison of its ranks. Times are seconds."""

    limits: Limits = field(default_factory=Limits)
    #: what each rank reported when the window began
    marks: dict[int, WorkerActivity] = field(default_factory=dict)
    began: float = 0.0
    #: windows in a row in which a rank was slow, as far as it is not named
    counts: dict[int, int] = field(default_factory=dict)
    #: slow ranks, with the windows in a row in which they were not
    slow: dict[int, int] = field(default_factory=dict)
    #: what was said last of each slow rank
    named: dict[int, SlowRank] = field(default_factory=dict)

    def begin(self) -> None:
        """A new world: its ranks may be on other nodes."""
        self.marks.clear()
        self.counts.clear()
        self.slow.clear()
        self.named.clear()

    def compare(
        self, workers: Mapping[int, WorkerActivity], nodes: Mapping[int, int], now: float
    ) -> list[SlowRank | SlowRankRecovered]:
        """Compare the ranks if a window has passed; ``nodes`` is the node of each rank."""
        if not self.limits.hang_detection:
            return []
        if workers.keys() != self.marks.keys():
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

    def _judge(
        self, paces: Mapping[int, Pace], nodes: Mapping[int, int]
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


def pace(before: WorkerActivity, now: WorkerActivity) -> Pace | None:
    """A rank's seconds per step between two reports; None with too few steps."""
    steps = now.steps - before.steps
    if steps < MIN_STEPS or now.ended:
        return None
    data = now.seconds[Activity.DATA] - before.seconds[Activity.DATA]
    return Pace((now.compute - before.compute) / steps, data / steps)


def _median_without(ordered: list[float], one: float) -> float:
    """The median of the others of an ascending list that ``one`` is in; itself where it is alone."""
    count = len(ordered) - 1
    if count < 1:
        return one
    position = bisect.bisect_left(ordered, one)

    def other(index: int) -> float:
        return ordered[index if index < position else index + 1]

    return (other((count - 1) // 2) + other(count // 2)) / 2
