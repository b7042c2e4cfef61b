"""The model of all-reduce jobs, on step times that follow it and on some that were measured."""

import random
from dataclasses import replace
from functools import cache

import pytest

from dlrover.errors import ConfigurationError
from dlrover.planning.allreduce import RingSample, RingShape, fit_ring

OVERLAP = 2.0

SIZES = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (3, 3), (4, 4)]
"""Nodes and replicas, four replicas at most."""


def compute_time(batch):
    return 0.05 + 0.002 * batch


def step_time(shape):
    more = max(shape.replicas - 2, 0)
    network = 0.0
    if shape.nodes > 1:
        network = 0.1 + 0.08 * more / shape.replicas + 0.001 * more
    elif shape.replicas > 1:
        network = 0.02 + 0.02 * more / shape.replicas
    compute = compute_time(shape.batch)
    return (compute**OVERLAP + network**OVERLAP) ** (1 / OVERLAP)


def measured(shape, noise=0.0, draw=None):
    factor = 1.0 if draw is None else draw.lognormvariate(0, noise)
    return RingSample(shape, step_time(shape) * factor, compute_time(shape.batch))


def true_throughput(shape):
    return shape.replicas * shape.batch / step_time(shape)


@cache
def small_model():
    draw = random.Random(1)
    shapes = [RingShape(n, k, b) for n, k in SIZES for b in (16, 32, 64, 128)]
    return fit_ring([measured(shape, 0.05, draw) for shape in shapes])


@pytest.mark.parametrize(("nodes", "replicas"), [(2, 8), (4, 16), (8, 32), (16, 64)])
def test_few_replicas_say_what_many_do(nodes, replicas):
    shape = RingShape(nodes, replicas, 64)
    assert small_model().predict(shape).throughput == pytest.approx(
        true_throughput(shape), rel=0.16
    )


def test_one_wrong_sample_changes_little():
    """One step of 28 was measured three times as long as it was."""
    draw = random.Random(1)
    shapes = [RingShape(n, k, b) for n, k in SIZES for b in (16, 32, 64, 128)]
    samples = [measured(shape, 0.05, draw) for shape in shapes]
    far = RingShape(4, 16, 64)
    right = fit_ring(samples).predict(far).throughput
    for wrong in range(0, len(samples), 3):
        tripled = list(samples)
        seconds = 3 * samples[wrong].step_seconds
        tripled[wrong] = replace(samples[wrong], step_seconds=seconds)
        assert fit_ring(tripled).predict(far).throughput == pytest.approx(right, rel=0.05)


def test_intervals_hold_the_measurements_within_and_beyond_what_was_measured():
    draw = random.Random(2)
    sizes = [*SIZES, (2, 8), (3, 12), (4, 16), (8, 32)]
    held = []
    for _ in range(300):
        nodes, replicas = draw.choice(sizes)
        shape = RingShape(nodes, replicas, draw.randint(16, 128))
        sample = measured(shape, 0.05, draw)
        prediction = small_model().predict(shape)
        throughput = shape.replicas * shape.batch / sample.step_seconds
        held.append(prediction.low <= throughput <= prediction.high)
    assert 0.86 <= sum(held) / len(held) <= 0.995


def test_more_confidence_is_a_wider_interval_around_the_same_value():
    shape = RingShape(2, 8, 64)
    some, most = (small_model().predict(shape, confidence) for confidence in (0.5, 0.99))
    assert most.low < some.low < some.throughput == most.throughput < some.high <= most.high


def test_what_was_never_measured_is_uncertain_and_never_better_than_without_network():
    one_node = [RingShape(1, k, b) for k in (1, 2) for b in (32, 64)]
    model = fit_ring([measured(shape) for shape in one_node])
    near, far = model.predict(RingShape(1, 2, 64)), model.predict(RingShape(4, 16, 64))
    assert near.high / near.low < 1.8 < far.high / far.low
    assert far.high < 1.5 * 16 * 64 / compute_time(64)


def test_a_sample_of_several_nodes_takes_the_uncertainty_away():
    one_node = [RingShape(1, k, b) for k in (1, 2) for b in (32, 64)]
    model = fit_ring([measured(shape) for shape in one_node])
    shape = RingShape(2, 4, 64)
    after = model.refit(measured(RingShape(2, 2, 64)))
    assert after.predict(shape).spread < 0.8 * model.predict(shape).spread


def test_passes_before_the_exchange_cost_only_computation():
    model = small_model()
    once, twice = (float(model.step_time(4, 4, 64, passes)) for passes in (1, 2))
    assert twice - once == pytest.approx(compute_time(64), rel=0.1)


MEASURED = [
    (1, 1, 0.701), (1, 2, 0.711), (1, 4, 0.750), (2, 2, 1.376), (2, 4, 2.041), (3, 3, 1.211),
    (3, 4, 1.263), (4, 4, 1.330), (4, 8, 1.532), (8, 16, 1.692), (8, 32, 1.913), (12, 24, 1.757),
    (16, 32, 1.763), (16, 64, 2.136),
]  # fmt: skip
"""Nodes, replicas and mean step time of BERT, from the measurements published with Pollux."""


def test_a_ring_extrapolates_measured_steps_better_than_the_published_form():
    samples = [RingSample(RingShape(n, k, 8), seconds, 0.69) for n, k, seconds in MEASURED]
    few, many = samples[:8], samples[8:]

    def error(form):
        model = fit_ring(few, form)
        steps = [float(model.step_time(s.shape.nodes, s.shape.replicas, 8)) for s in many]
        found = [abs(step / s.step_seconds - 1) for step, s in zip(steps, many, strict=True)]
        return sum(found) / len(found)

    assert error("ring") < 0.25 < error("pollux")


def test_what_cannot_be_fitted():
    with pytest.raises(ConfigurationError, match="samples is empty"):
        fit_ring([])
    with pytest.raises(ConfigurationError, match="step_seconds is -1"):
        fit_ring([RingSample(RingShape(1, 1, 1), -1.0)])
