"""How a global batch is dealt to ranks."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from dlrover.errors import ConfigurationError
from dlrover.training import batch

sizes = st.integers(1, 200)
replicas = st.integers(1, 20)
micro_batch_sizes = st.none() | st.integers(1, 40)


@given(sizes, replicas, micro_batch_sizes)
def test_every_sample_is_computed_once_with_its_weight(size, replicas, most) -> None:
    weights = dict.fromkeys(range(size), Fraction(0))
    times = dict.fromkeys(range(size), 0)
    for rank in range(replicas):
        for positions, weight in batch.deal(size, replicas, rank, most):
            exact = Fraction(weight).limit_denominator(size)
            for position in positions:
                weights[position] += exact / len(positions) / replicas
                times[position] += weight > 0
    assert set(times.values()) == {1}
    assert set(weights.values()) == {Fraction(1, size)}


@given(sizes, replicas, micro_batch_sizes)
def test_all_ranks_make_equally_many_passes_within_the_limit(size, replicas, most) -> None:
    dealt = [batch.deal(size, replicas, rank, most) for rank in range(replicas)]
    assert {len(one) for one in dealt} == {batch.passes(size, replicas, most)}
    lengths = [len(positions) for one in dealt for positions, _ in one]
    assert min(lengths) >= 1
    assert max(lengths) <= (most or size)


@given(sizes, replicas, st.integers(1, 40))
def test_no_pass_is_made_without_need(size, replicas, most) -> None:
    largest = -(-size // replicas)
    assert (batch.passes(size, replicas, most) - 1) * most < largest


def test_thirty_two_samples_on_three_ranks() -> None:
    dealt = [batch.deal(32, 3, rank, 4) for rank in range(3)]
    assert [[len(p) for p, _ in one] for one in dealt] == [[3, 4, 4], [3, 4, 4], [3, 3, 4]]
    assert [sum(w for _, w in one) for one in dealt] == pytest.approx([33 / 32, 33 / 32, 30 / 32])


@given(st.integers(1, 100), st.lists(st.integers(1, 60), min_size=1, max_size=8), micro_batch_sizes)
def test_with_shares_too_every_sample_is_computed_once_with_its_weight(size, shares, most) -> None:
    size = min(size, sum(shares))
    times, weights = [0] * size, [Fraction(0)] * size
    for rank in range(len(shares)):
        dealt = batch.deal(size, len(shares), rank, most, shares)
        assert dealt
        for positions, weight in dealt:
            assert 1 <= len(positions) <= (most or size)
            for position in positions:
                times[position] += weight > 0
                exact = Fraction(weight).limit_denominator(size)
                weights[position] += exact / len(positions) / len(shares)
    assert set(times) == {1}
    assert set(weights) == {Fraction(1, size)}


def test_a_rank_makes_as_many_passes_as_its_share_needs() -> None:
    shares = (14, 14, 4)
    dealt = [batch.deal(32, 3, rank, 4, shares) for rank in range(3)]
    assert [[len(p) for p, _ in one] for one in dealt] == [[3, 4, 3, 4], [3, 4, 3, 4], [4]]
    assert sum(len(p) for one in dealt for p, _ in one) == 32


def test_a_smaller_last_batch_is_dealt_in_proportion() -> None:
    dealt = [batch.deal(16, 3, rank, None, (14, 14, 4)) for rank in range(3)]
    assert [len(p) for one in dealt for p, _ in one] == [7, 7, 2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0, 1, 1), "global_batch_size is 0; it must be an integer of at least 1."),
        ((9.5, 1, 1), "global_batch_size is 9.5; it must be an integer of at least 1."),
        ((8, 0, 1), "micro_batch_size is 0; it must be an integer of at least 1."),
        ((2, 1, 3), "global_batch_size is 2; it must be at least 3, the number of workers"),
    ],
)
def test_impossible_sizes_are_refused(arguments, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        batch.check(*arguments)
    assert str(refused.value).startswith(sentence)


def test_equal_micro_batches_for_other_trainers() -> None:
    steps = [batch.accumulation_steps(96, 8, replicas) for replicas in (1, 2, 3, 4)]
    assert steps == [12, 6, 4, 3]
    with pytest.raises(ConfigurationError, match="on 5 workers it must be a multiple of 40"):
        batch.accumulation_steps(96, 8, 5)
