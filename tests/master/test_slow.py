"""Slow ranks: who is named, when, with which cause, and when it is cleared."""

from __future__ import annotations

import pytest

from dlrover.master.machine.watches.slow import SpeedWatch, _median_without
from dlrover.spec.activity import Activity
from dlrover.spec.events import SlowRank, SlowRankRecovered
from dlrover.spec.job import Limits
from dlrover.spec.measurements import WorkerActivity


class Ranks:
    """Ranks that step together, each with its own time."""

    def __init__(self, count: int, **limits) -> None:
        self.watch = SpeedWatch(Limits(**limits))
        self.compute = [0.1] * count
        self.data = [0.01] * count
        self._sums = [(0, 0.0, 0.0)] * count
        self.now = 0.0
        self.window(0)

    def window(self, steps: int = 100) -> list:
        """30 seconds pass."""
        self.now += 30
        self._sums = [
            (s + steps, c + steps * compute, d + steps * data)
            for (s, c, d), compute, data in zip(self._sums, self.compute, self.data, strict=True)
        ]
        workers = {}
        for rank, (made, compute, data) in enumerate(self._sums):
            seconds = [0.0] * len(Activity)
            seconds[Activity.DATA] = data
            workers[rank] = WorkerActivity(made, Activity.STEP, 0.0, tuple(seconds), compute)
        return self.watch.compare(workers, {rank: rank // 2 for rank in workers}, self.now)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_slow_rank_is_named_after_three_windows_and_cleared_after_three(count: int):
    ranks = Ranks(count)
    ranks.compute[1] = 0.13
    assert [ranks.window(), ranks.window()] == [[], []]
    (slow,) = ranks.window()
    assert slow == SlowRank(1, 0, pytest.approx(1.3), "compute")
    assert ranks.window() == []
    ranks.compute[1] = 0.1
    assert [ranks.window(), ranks.window()] == [[], []]
    assert ranks.window() == [SlowRankRecovered(1, 0)]
    assert ranks.window() == []


def test_a_rank_that_is_slow_now_and_then_is_not_named():
    ranks = Ranks(4)
    for _ in range(10):
        ranks.compute[2] = 0.2
        assert [ranks.window(), ranks.window()] == [[], []]
        ranks.compute[2] = 0.1
        assert ranks.window() == []


def test_a_rank_that_waits_for_its_data():
    ranks = Ranks(4)
    ranks.compute[3], ranks.data[3] = 0.15, 0.06
    found = [ranks.window() for _ in range(3)][-1]
    assert found == [SlowRank(3, 1, pytest.approx(1.5), "data")]
    assert "Rank 3 on node 1 is slow: it waits for its data, and takes 1.50" in found[0].sentence()


def test_nothing_is_compared_while_a_rank_makes_no_steps():
    ranks = Ranks(4)
    ranks.compute[1] = 0.2
    assert [ranks.window(steps=0) for _ in range(5)] == [[]] * 5
    assert [bool(ranks.window()) for _ in range(3)] == [False, False, True]


def test_another_world_begins_anew():
    ranks = Ranks(4)
    ranks.compute[1] = 0.2
    ranks.window(), ranks.window(), ranks.window()
    ranks.watch.begin()
    assert not ranks.watch.named
    assert [bool(ranks.window()) for _ in range(4)] == [False, False, False, True]


def test_a_rank_that_was_started_again_is_compared_from_then_on():
    """Its times would be compared with those of the process before: nobody was named any more."""
    ranks = Ranks(3)
    ranks.data[2] = 2.0  # most of what is known of a process's age here
    ranks.window()
    ranks._sums[2] = (200, 0.0, 0.0)
    ranks.data[2] = 0.01
    ranks.compute[1] = 0.13
    assert [ranks.window(), ranks.window(), ranks.window()] == [[], [], []]
    assert ranks.window() == [SlowRank(1, 0, pytest.approx(1.3), "compute")]


def test_the_median_of_the_others():
    assert _median_without([1, 2], 2) == 1
    assert _median_without([1, 2, 4], 4) == 1.5
    assert _median_without([1, 2, 4, 4], 4) == 2
    assert _median_without([1, 2, 4], 1) == 3
    assert _median_without([3], 3) == 3


def test_one_rank_alone_is_never_slow():
    ranks = Ranks(1)
    assert [ranks.window() for _ in range(4)] == [[]] * 4


def test_a_ratio_of_ones_own():
    ranks = Ranks(4, slow_rank_ratio=1.5, slow_rank_windows=1)
    ranks.compute[0] = 0.14
    assert ranks.window() == []
    ranks.compute[0] = 0.16
    assert len(ranks.window()) == 1
