"""Memory: what grows, what only wobbles, and what to order."""

import random

import pytest
from hypothesis import given, strategies as st

from dlrover.errors import ConfigurationError
from dlrover.planning.memory import (
    GIB,
    MemorySample,
    exhausted_at,
    forecast,
    prevent_oom,
)


def growing(start, slope, until, noise=0.0, count=20, seed=1):
    draw = random.Random(seed)
    moments = [until * i / (count - 1) for i in range(count)]
    return [
        MemorySample(at, round((start + slope * at + draw.gauss(0, noise)) * GIB)) for at in moments
    ]


@given(st.floats(1, 30), st.floats(1, 60), st.floats(0.1, 0.9))
def test_growth_is_extended_to_the_end(start, slope, until):
    found = forecast(growing(start, slope, until))
    assert found.expected == pytest.approx((start + slope) * GIB, rel=1e-3)
    assert exhausted_at(
        growing(start, slope, until), round((start + slope) * GIB)
    ) == pytest.approx(1.0, rel=1e-3)


def test_the_high_forecast_is_rarely_exceeded():
    exceeded = 0
    for seed in range(200):
        samples = growing(8, 10, 0.4, noise=0.5, seed=seed)
        end = (18 + random.Random(1000 + seed).gauss(0, 0.5)) * GIB
        exceeded += end > forecast(samples).high
    assert exceeded <= 14  # 2.3 % are expected of two deviations


def test_use_that_goes_up_and_down_is_not_growth():
    samples = growing(8, 0.0, 0.5, noise=0.5)
    assert forecast(samples).slope == 0
    assert forecast(samples).high == max(sample.used for sample in samples)
    assert exhausted_at(samples, 9 * GIB) is None


def test_a_node_gets_more_before_it_runs_out():
    advice = prevent_oom("ps-0", growing(8, 20, 0.3), 16 * GIB, 64 * GIB)
    assert advice is not None
    assert 28 * GIB < advice.memory <= 36 * GIB
    assert not advice.more_nodes
    assert advice.reason == (
        "ps-0 is expected to need 28.0 GiB of its 16.0 GiB, which it reaches at progress 0.40"
    )


def test_a_node_that_has_enough_is_left_alone():
    assert prevent_oom("ps-0", growing(8, 20, 0.3), 32 * GIB, 64 * GIB) is None
    assert prevent_oom("ps-0", [], 32 * GIB, 64 * GIB) is None


def test_a_model_too_large_for_a_node_is_divided():
    advice = prevent_oom("ps-0", growing(8, 80, 0.3), 32 * GIB, 64 * GIB)
    assert advice is not None
    assert advice.more_nodes
    assert advice.memory == 64 * GIB


def test_no_sample_no_forecast():
    with pytest.raises(ConfigurationError, match="samples is empty"):
        forecast([])
