"""What replicas count at a sync. Several cases are faults that were found in other implementations."""

from __future__ import annotations

import math
import random
from statistics import fmean, pstdev

import pytest
from hypothesis import given, strategies as st

from dlrover.errors import ConfigurationError
from dlrover.optim.machine.penalty import Penalty, PenaltyDecision, ReplicaReport, Statistics, judge

ALONE = Penalty(threshold=3.0, warmup=120, temperature=math.inf)


def at(*norms: float, steps: int = 1) -> list[ReplicaReport | None]:
    return [ReplicaReport(norm, steps) for norm in norms]


def left_out(decision: PenaltyDecision) -> list[int]:
    return [rank for rank, reason in enumerate(decision.reasons) if reason]


def after(norms: list[float], penalty: Penalty = ALONE) -> Statistics:
    """Statistics of one replica's norms."""
    statistics = Statistics()
    for norm in norms:
        statistics = judge(at(norm), statistics, penalty).statistics
    return statistics


def usual(count: int, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(1.0, 0.05) for _ in range(count)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("penalty", [None, Penalty(), ALONE])
def test_what_is_not_finite_counts_nothing_from_the_first_sync_on(bad, penalty) -> None:
    decision = judge(at(1.0, bad, 1.0, 1.0), Statistics(), penalty)
    assert decision.weights == pytest.approx((1 / 3, 0, 1 / 3, 1 / 3))
    assert left_out(decision) == [1]
    assert decision.reasons[1] == f"the norm of its change is {bad}"


def test_what_is_not_finite_does_not_enter_the_statistics() -> None:
    statistics = after(usual(130))
    spoilt = judge(at(math.nan), statistics, ALONE).statistics
    assert spoilt == statistics
    assert left_out(judge(at(1e6), spoilt, ALONE)) == [0]


def test_right_after_an_anomaly_the_next_is_found() -> None:
    statistics = after(usual(130))
    first = judge(at(10.0, 1.0), statistics, ALONE)
    assert left_out(first) == [0]
    second = judge(at(10.0, 1.0), first.statistics, ALONE)
    assert left_out(second) == [0]
    assert second.statistics.mean == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("size", [1.2, 1.25, 1.5])
def test_after_the_warmup_the_estimate_is_not_biased(size) -> None:
    norms = usual(120)
    statistics = after(norms)
    assert statistics.mean == pytest.approx(fmean(norms), abs=0.02)
    assert math.sqrt(statistics.variance) == pytest.approx(pstdev(norms), rel=0.25)
    assert left_out(judge(at(size), statistics, ALONE)) == [0]


def test_of_usual_norms_few_are_left_out() -> None:
    wrong, statistics = 0, Statistics()
    for norm in usual(10_000):
        decision = judge(at(norm, 1.0), statistics, ALONE)
        wrong += bool(decision.reasons[0])
        statistics = decision.statistics
    assert wrong <= 20  # 0.2 %; 0.13 % of a normal distribution


def test_those_that_count_have_weights_that_add_up_to_one() -> None:
    decision = judge(at(1.0, 2.0, math.nan, 3.0), Statistics(), Penalty(temperature=0.5))
    shares = [math.exp(-1.0 / 0.5), math.exp(-2.0 / 0.5), 0, math.exp(-3.0 / 0.5)]
    assert decision.weights == pytest.approx([share / sum(shares) for share in shares])
    assert math.fsum(decision.weights) == pytest.approx(1.0, rel=1e-15)


def test_with_a_high_temperature_the_weights_are_those_of_the_mean() -> None:
    weights = judge(at(1.0, 2.0, 3.0), Statistics(), Penalty(temperature=1e9)).weights
    assert weights == pytest.approx([1 / 3] * 3, rel=1e-8)
    equal = judge(at(1.0, 2.0, 3.0, 0.5), Statistics(), Penalty(temperature=math.inf)).weights
    assert equal == (0.25,) * 4


def test_during_the_warmup_norms_are_compared_with_each_other() -> None:
    penalty = Penalty(temperature=math.inf)
    for norms in ((1.0, 1000.0), (1000.0, 1.1, 1.0), (1.0, 1000.0, 1.0, 1000.0)):
        decision = judge(at(*norms), Statistics(), penalty)
        assert left_out(decision) == [rank for rank, norm in enumerate(norms) if norm == 1000.0]
    assert left_out(judge(at(0.0, 0.0, 5.0), Statistics(), penalty)) == []


def test_a_replica_that_made_more_steps_may_have_a_larger_norm() -> None:
    reports: list[ReplicaReport | None] = [
        ReplicaReport(1.0, 1),
        ReplicaReport(20.0, 25),
        ReplicaReport(1.1, 1),
    ]
    assert left_out(judge(reports, Statistics(), Penalty())) == []


def test_if_none_counts_all_weights_are_zero_until_the_level_is_a_new_one() -> None:
    statistics = after(usual(130))
    weights = []
    for _ in range(4):
        decision = judge(at(1000.0, 1001.0), statistics, ALONE)
        weights.append(decision.weights)
        statistics = decision.statistics
    assert weights == [(0, 0), (0, 0), (0.5, 0.5), (0.5, 0.5)]
    assert statistics.mean == pytest.approx(1000.5)
    assert judge(at(math.nan, math.nan), statistics, ALONE).weights == (0, 0)


def test_a_replica_that_joins_counts_nothing_and_is_no_anomaly() -> None:
    decision = judge([None, ReplicaReport(2.0, 5)], Statistics(), Penalty())
    assert decision.weights == (0, 1)
    assert decision.statistics.mean == pytest.approx(2.0 / math.sqrt(5))


@given(st.lists(st.floats(0, 1e100) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=6),
       st.integers(0, 2**32))  # fmt: skip
def test_weights_add_up_to_one_or_nothing_and_statistics_stay_finite(norms, seed) -> None:
    statistics = Statistics()
    chance = random.Random(seed)
    for _ in range(30):
        chance.shuffle(norms)
        decision = judge(at(*norms), statistics, Penalty(warmup=5))
        total = math.fsum(decision.weights)
        assert total == pytest.approx(1.0) or total == 0
        for weight, reason in zip(decision.weights, decision.reasons, strict=True):
            assert not (weight and reason)
        statistics = decision.statistics
        assert math.isfinite(statistics.mean)
        assert statistics.variance >= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, "Penalty: threshold is 0.0; it must be more than 0."),
        ({"temperature": -1.0}, "Penalty: temperature is -1.0; it must be more than 0."),
        ({"smoothing": 1.0}, "Penalty: smoothing is 1.0; it must be between 0 and 1."),
        ({"patience": 0}, "Penalty: warmup is 20 and patience 0; they must be 1 or more."),
    ],
)
def test_an_option_out_of_its_range_is_named(options, message) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Penalty(**options)
    assert str(caught.value) == message
