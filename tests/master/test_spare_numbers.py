"""The number of spare nodes: the published table, extremes, and when the number changes."""

from __future__ import annotations

import math

import pytest

from dlrover.master.machine.spares import (
    PRIOR_RATE,
    PRIOR_SECONDS,
    Spares,
    next_spares,
    spares_for,
)
from dlrover.spec.job import JobSpec

HOURS = (1, 6, 24, 72)
RSC_1, RSC_2 = 6.5e-3, 2.34e-3

TABLE = {
    (16, RSC_1): (0, 1, 1, 2),
    (16, RSC_2): (0, 0, 1, 1),
    (128, RSC_1): (1, 2, 3, 7),
    (128, RSC_2): (1, 1, 2, 4),
    (512, RSC_1): (1, 4, 8, 18),
    (512, RSC_2): (1, 2, 4, 9),
    (1024, RSC_1): (2, 5, 13, 31),
    (1024, RSC_2): (1, 3, 7, 14),
    (2048, RSC_1): (3, 8, 22, 55),
    (2048, RSC_2): (2, 4, 11, 24),
}
"""Smallest s with P[Binom(N, 1 - exp(-r W)) <= s] >= .99, by nodes and failures per node and day."""


@pytest.mark.parametrize(("job", "expected"), TABLE.items())
def test_the_published_table(job: tuple[int, float], expected: tuple[int, ...]) -> None:
    nodes, rate = job
    assert tuple(spares_for(nodes, rate, 3600.0 * hours) for hours in HOURS) == expected


def test_byterobust_has_2_2_3_4_spares_for_128_to_1024_machines() -> None:
    """Its four values fit one probability of failure per machine."""
    rate = -math.log1p(-1.2e-3)
    assert [spares_for(n, rate, 86400.0) for n in (128, 256, 512, 1024)] == [2, 2, 3, 4]


def test_extremes() -> None:
    assert spares_for(100, 0.0, 3600.0) == 0
    assert spares_for(100, RSC_2, 0.0) == 0
    assert spares_for(0, RSC_2, 3600.0) == 0
    assert spares_for(4, 1e6, 86400.0) == 4  # each node fails for certain
    many = spares_for(
        100_000, 1.0, 86400.0
    )  # the first term of the sum is far below the least float
    assert 63_500 < many < 63_700


def measured(
    failures: int = 0, node_seconds: float = 0.0, replacements: tuple[float, ...] = ()
) -> Spares:
    return Spares(
        JobSpec(name="job"),
        failures=failures,
        node_seconds=node_seconds,
        replacements=[*replacements],
    )


def test_the_prior_counts_as_one_failure() -> None:
    assert measured().rate == pytest.approx(PRIOR_RATE)
    assert measured().seconds == PRIOR_SECONDS
    assert measured(node_seconds=86400.0 / PRIOR_RATE).rate == pytest.approx(PRIOR_RATE / 2)
    some = measured(failures=9, node_seconds=8640000.0)
    assert some.rate == pytest.approx(10 / (427.35 + 100), rel=1e-3)
    assert measured(replacements=(10.0, 30.0)).seconds == 20.0


def test_the_number_rises_at_once_and_falls_by_a_margin() -> None:
    assert next_spares(0, 512, PRIOR_RATE, 86400.0) == 4
    assert spares_for(512, PRIOR_RATE, 70000.0) == 4
    assert spares_for(512, PRIOR_RATE, 50000.0) == 3
    assert next_spares(4, 512, PRIOR_RATE, 70000.0) == 4
    assert next_spares(4, 512, PRIOR_RATE, 50000.0) == 4  # three are enough, but barely
    assert next_spares(4, 512, PRIOR_RATE, 3600.0) == 1
