"""What a larger batch is worth."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dlrover.planning.allreduce import RingSample, RingShape, fit_ring
from dlrover.planning.efficiency import BatchLimits, GradientNoise, best_batches


def model():
    sizes = [(1, 1), (1, 4), (2, 8), (4, 16)]
    return fit_ring(
        [
            RingSample(RingShape(n, k, b), 0.05 + 0.001 * b + 0.05 * (k > 1), 0.05 + 0.001 * b)
            for n, k in sizes
            for b in (16, 64, 256)
        ]
    )


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(1, 100))
def test_a_larger_batch_is_never_more_efficient(square, variance, times):
    noise = GradientNoise(square, variance, 64)
    assert noise.efficiency(64) == pytest.approx(1.0)
    smaller, larger = noise.efficiency(64 * times), noise.efficiency(64 * (times + 1))
    assert 1 / (times + 1) - 1e-9 <= larger <= smaller + 1e-12 <= 1 + 1e-9


def test_the_best_batch_grows_with_the_noise():
    limits = BatchLimits(64, 8192, 8, 256)
    calm, noisy = (
        best_batches(model(), GradientNoise(1.0, v, 64), limits, 4, 16) for v in (0.1, 100.0)
    )
    total = [int(b.batch[0] * b.passes[0]) * 16 for b in (calm, noisy)]
    assert total[0] < total[1] <= 8192
    assert noisy.goodput[0] > calm.goodput[0]


def test_the_best_batch_is_the_best_of_all_that_are_allowed():
    fitted, noise = model(), GradientNoise(1.0, 10.0, 64)
    found = best_batches(fitted, noise, BatchLimits(64, 4096, 4, 256), 4, 16)
    every = [
        float(fitted.throughput_of(4, 16, b) * noise.efficiency(16 * b)) for b in range(4, 257)
    ]
    assert found.goodput[0] > 0.99 * max(every)


def test_a_fixed_batch_is_divided_and_taken_in_passes():
    limits = BatchLimits(1024, 1024, 8, 100)
    found = best_batches(model(), None, limits, np.array([1, 2, 4]), np.array([4, 8, 16]))
    assert found.batch.tolist() == [86, 64, 64]
    assert found.passes.tolist() == [3, 2, 1]


def test_too_many_replicas_for_the_batch_have_no_goodput():
    found = best_batches(model(), None, BatchLimits(64, 64, 32), np.array([1, 1]), np.array([2, 4]))
    assert found.goodput[0] > 0
    assert found.goodput[1] == 0
