"""Shuffling: a permutation, the same everywhere, and one that looks random."""

import itertools
import statistics

import pytest
from hypothesis import given, strategies as st

from dlrover.sharding.order import shuffled


@pytest.mark.slow
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 100))
def test_it_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    record = shuffled(size, seed, epoch)
    assert sorted(map(record, range(size))) == list(range(size))


def test_it_never_changes() -> None:
    """A checkpoint of today is read by a release of tomorrow: position 0 must be the same record."""
    assert [shuffled(1000, 7, 0)(n) for n in range(5)] == FIRST
    assert shuffled(10**12, 7, 3)(5) == LARGE


FIRST = [721, 678, 961, 736, 917]
LARGE = 290285651484


@pytest.mark.parametrize("other", [(7, 1), (8, 0)])
def test_epochs_and_seeds_differ(other: tuple[int, int]) -> None:
    first, second = shuffled(1000, 7, 0), shuffled(1000, *other)
    assert sum(first(n) == second(n) for n in range(1000)) < 10


def test_neighbours_do_not_stay_together() -> None:
    """The mean distance of neighbours of a random permutation of n is n / 3."""
    size = 10_000
    record = shuffled(size, 1, 0)
    places = [record(n) for n in range(2000)]
    distances = [abs(a - b) for a, b in itertools.pairwise(places)]
    assert 0.3 < statistics.mean(distances) / size < 0.37
    assert 0.47 < statistics.mean(places) / size < 0.53
