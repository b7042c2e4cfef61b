"""Shuffling: a permutation, the same everywhere, and one that looks random."""

import itertools
import statistics

import pytest
from hypothesis import given, strategies as st

from dlrover.data.machine import order
from dlrover.data.machine.order import Shuffled


@pytest.mark.slow
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 100))
def test_it_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    records = Shuffled(size, seed, epoch).records(range(size))
    assert sorted(records) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 10**12, 2**62])
def test_it_is_the_same_with_numpy_and_without(size: int, monkeypatch) -> None:
    shuffled = Shuffled(size, 5, 1)
    positions = range(0, size, max(1, size // 200))
    records = shuffled.records(positions)
    assert records == [shuffled.record(position) for position in positions]
    monkeypatch.setattr(order, "_numpy", lambda: None)
    assert records == shuffled.records(positions)


def test_it_never_changes() -> None:
    """A checkpoint of today is read by a release of tomorrow: position 0 must be the same record."""
    assert [Shuffled(1000, 7, 0).record(n) for n in range(5)] == FIRST
    assert Shuffled(10**12, 7, 3).record(5) == LARGE


FIRST = [582, 825, 271, 305, 97]
LARGE = 302591234513


@pytest.mark.parametrize("other", [(7, 1), (8, 0)])
def test_epochs_and_seeds_differ(other: tuple[int, int]) -> None:
    orders = Shuffled(1000, 7, 0), Shuffled(1000, *other)
    first, second = (shuffled.records(range(1000)) for shuffled in orders)
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10


def test_neighbours_do_not_stay_together() -> None:
    """The mean distance of neighbours of a random permutation of n is n / 3."""
    size = 10_000
    places = Shuffled(size, 1, 0).records(range(2000))
    distances = [abs(a - b) for a, b in itertools.pairwise(places)]
    assert 0.3 < statistics.mean(distances) / size < 0.37
    assert 0.47 < statistics.mean(places) / size < 0.53
