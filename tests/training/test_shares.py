"""Shares of the global batch by speed: what is decided from what the ranks took."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.training.shares import REST, Shares, by_speed


def windows(shares: Shares, count: int, seconds) -> list[str]:
    """What is said in so many windows; ``seconds`` is the time of each rank with its share."""
    said = [
        shares.decide([each(n) for each, n in zip(seconds, shares.now, strict=True)])
        for _ in range(count)
    ]
    return [sentence for sentence in said if sentence]


def per_sample(seconds: float, fixed: float = 0.0):
    return lambda n: fixed + seconds * n


def test_a_rank_that_is_three_times_as_slow_takes_a_third_of_what_the_others_take() -> None:
    shares = Shares(56, 3)
    assert shares.now == (19, 19, 18)
    said = windows(shares, 5, [per_sample(0.01), per_sample(0.01), per_sample(0.03)])
    assert shares.now == (24, 24, 8)
    assert said == [
        "rank 2 is the slowest and takes 8 of 56 samples instead of 18: steps get 56% shorter than with"
        " equal shares"
    ]


def test_ranks_that_are_nearly_as_fast_keep_equal_shares() -> None:
    shares = Shares(60, 3)
    assert windows(shares, 5, [per_sample(0.01), per_sample(0.0102), per_sample(0.0103)]) == []
    assert shares.now == (20, 20, 20)


def test_a_rank_that_recovers_gets_its_share_back() -> None:
    shares = Shares(60, 2)
    windows(shares, 3, [per_sample(0.01), per_sample(0.02)])
    assert shares.now == (40, 20)
    windows(shares, 3, [per_sample(0.01), per_sample(0.01)])
    assert shares.now == (30, 30)


def test_what_does_not_depend_on_the_share_is_found_in_a_few_windows() -> None:
    """Half of the slow rank's time is there with any share."""
    shares = Shares(600, 2)
    seconds = [per_sample(0.001), per_sample(0.001, fixed=0.3)]
    windows(shares, 8, seconds)
    fast, slow = (each(n) for each, n in zip(seconds, shares.now, strict=True))
    assert slow == pytest.approx(fast, rel=0.06)


def test_a_change_that_does_not_help_is_taken_back_and_not_tried_again_soon() -> None:
    shares = Shares(60, 2)
    seconds = [per_sample(0.0, fixed=0.1), per_sample(0.0, fixed=0.2)]
    said = windows(shares, 2, seconds)
    assert "rank 1 is the slowest" in said[0]
    assert said[1] == (
        "those before are back, because with the new ones the slowest rank took 0.2 s for a step, and 0.2 s"
        " before"
    )
    assert shares.now == (30, 30)
    assert windows(shares, REST, seconds) == []
    assert len(windows(shares, 1, seconds)) == 1


@settings(max_examples=30)
@given(st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=12), st.integers(0, 300))
def test_shares_are_those_of_the_whole_batch_and_no_rank_is_left_without(each, more) -> None:
    batch = len(each) + more
    shares = Shares(batch, len(each))
    windows(shares, 4, [per_sample(s) for s in each])
    assert sum(shares.now) == batch
    assert min(shares.now) >= 1


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(0, 200))
def test_shares_are_whole_and_no_single_move_makes_the_step_shorter(each, extra) -> None:
    batch = len(each) + extra
    shares = by_speed(batch, each)
    assert sum(shares) == batch
    assert min(shares) >= 1
    times = [share * seconds for share, seconds in zip(shares, each, strict=True)]
    slowest = times.index(max(times))
    for other, seconds in enumerate(each):
        if other != slowest and shares[slowest] > 1:
            assert (shares[other] + 1) * seconds >= max(times) * (1 - 1e-9)


def test_the_slow_rank_takes_less() -> None:
    shares = by_speed(400, [1.0, 1.0, 1.0, 2.0])
    assert shares[3] == 57
    assert sorted(shares) == [57, 114, 114, 115]
