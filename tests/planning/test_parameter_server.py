"""The models of parameter-server jobs: what they are fitted to, and what they say of it."""

import random

import numpy as np
import pytest

from dlrover.errors import ConfigurationError
from dlrover.planning.parameter_server import ServerSample, ServerShape, fit_servers

BATCH = 512
COEFFICIENTS = {  # seconds: constant, m/cw, w/(p*cp), w/p, m/p
    "constant": 0.02,
    "compute": 0.5e-3,
    "update": 0.03,
    "network": 0.004,
    "lookup": 2e-5,
}


def true_throughput(shape):
    c = COEFFICIENTS
    seconds = (
        c["constant"]
        + c["compute"] * shape.batch / shape.worker_cpu
        + c["update"] * shape.workers / (shape.servers * shape.server_cpu)
        + c["network"] * shape.workers / shape.servers
        + c["lookup"] * shape.batch / shape.servers
    )
    return shape.batch * shape.workers / seconds


def measured(shape, noise=0.0, draw=None):
    factor = 1.0 if draw is None else draw.lognormvariate(0, noise)
    return ServerSample(shape, true_throughput(shape) * factor)


def shapes(draw, count):
    return [
        ServerShape(
            draw.randint(1, 30),
            draw.randint(1, 12),
            draw.choice([2, 4, 8, 16]),
            draw.choice([2, 4, 8, 16]),
            draw.choice([128, BATCH]),
        )
        for _ in range(count)
    ]


def test_coefficients_are_recovered():
    draw = random.Random(3)
    model = fit_servers([measured(shape) for shape in shapes(draw, 40)])
    assert model.coefficients == pytest.approx(list(COEFFICIENTS.values()), rel=0.01)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_one_wrong_sample_changes_little(factor):
    """One throughput of 28 was measured three times as high, or as low, as it was."""
    draw = random.Random(1)
    samples = [measured(shape, 0.05, draw) for shape in shapes(draw, 28)]
    others, errors = shapes(draw, 10), []
    for wrong in range(0, len(samples), 3):
        sample, fitted = samples[wrong], list(samples)
        fitted[wrong] = ServerSample(sample.shape, factor * sample.throughput)
        model = fit_servers(fitted)
        errors += [abs(model.predict(s).throughput / true_throughput(s) - 1) for s in others]
    assert np.mean(errors) < 0.04


def test_no_step_is_predicted_to_take_no_time():
    """All that grows with the workers alone is left of the form: one worker would need nothing."""
    samples = [ServerSample(ServerShape(w, 2), 10.0 * w / (w - 1)) for w in (2, 4, 8)]
    for form in ("queue", "optimus-async"):
        model = fit_servers(samples, form)
        assert 0 < model.predict(ServerShape(1, 2)).throughput < 1000


def test_noise_is_recovered_and_the_intervals_hold_it():
    draw = random.Random(5)
    model = fit_servers([measured(shape, 0.08, draw) for shape in shapes(draw, 60)])
    assert model.noise == pytest.approx(0.08, rel=0.25)
    unseen = [measured(shape, 0.08, draw) for shape in shapes(draw, 400)]
    inside = 0
    for sample in unseen:
        prediction = model.predict(sample.shape)
        inside += prediction.low <= sample.throughput <= prediction.high
    assert 0.84 <= inside / len(unseen) <= 0.96


CURVES = {
    6: [0.46, 1.02, 1.57, 1.85, 1.97, 2.13, 2.45, 2.54],
    12: [0.53, 1.10, 1.65, 2.05, 2.50, 2.87, 2.98, 3.06],
}
"""Throughputs of 4, 8, ... 32 workers by servers, read off a figure of DLRover-RM, in 1e5 samples per second."""


def test_published_curves_within_six_per_cent():
    samples = [
        ServerSample(ServerShape(workers, servers), throughput * 1e5)
        for servers, curve in CURVES.items()
        for workers, throughput in zip(range(4, 33, 4), curve, strict=True)
    ]
    model = fit_servers(samples)
    errors = [abs(model.predict(s.shape).throughput / s.throughput - 1) for s in samples]
    assert np.mean(errors) < 0.06


def test_a_column_that_no_sample_tells_apart_widens_the_interval_where_it_would_matter():
    same_cpu = [ServerShape(w, p, 8, 8, BATCH) for w in (2, 4, 8) for p in (1, 2, 4)]
    model = fit_servers([measured(shape) for shape in same_cpu])
    near = model.predict(ServerShape(6, 3, 8, 8, BATCH))
    other_cpu = model.predict(ServerShape(6, 3, 32, 8, BATCH))
    assert near.high / near.low < 1.3
    assert other_cpu.high / other_cpu.low > 1.5


def test_a_size_that_tells_the_columns_apart_is_the_least_known_one():
    tried = [ServerShape(w, p, 8, 8, BATCH) for w in (2, 4) for p in (1, 2)]
    model = fit_servers([measured(shape) for shape in tried])
    again, new = ServerShape(3, 2, 8, 8, BATCH), ServerShape(4, 2, 16, 8, BATCH)
    assert model.predict(new).spread > model.predict(again).spread
    after = model.refit(measured(new))
    assert after.predict(new).spread < model.predict(new).spread / 2


@pytest.mark.parametrize(
    ("form", "seconds"),
    [
        ("optimus-async", lambda w, p: 0.1 + 0.02 * w / p + 0.003 * w + 0.005 * p),
        ("optimus-sync", lambda w, p: 1e-3 * 64 + 0.05 + 0.02 * w / p + 0.003 * w + 0.004 * p),
        ("queue", lambda w, p: 0.1 + 64e-3 / p + 64 * 5e-4 * (w - 1) / p),
    ],
)
def test_the_other_forms(form, seconds):
    grid = [(w, p) for w in (1, 2, 4, 8) for p in (1, 2, 3)]
    samples = [ServerSample(ServerShape(w, p, batch=64), 64 * w / seconds(w, p)) for w, p in grid]
    model = fit_servers(samples, form)
    truth = 64 * 16 / seconds(16, 4)
    assert model.predict(ServerShape(16, 4, batch=64)).throughput == pytest.approx(truth, rel=0.01)


def test_a_single_worker_says_nothing_of_queues_and_the_interval_says_so():
    model = fit_servers([ServerSample(ServerShape(1, p), 10.0) for p in (1, 1, 2)], "queue")
    alone, many = model.predict(ServerShape(1, 1)), model.predict(ServerShape(8, 1))
    assert alone.throughput == pytest.approx(10.0, rel=0.05)
    assert many.high / many.low > 4 * alone.high / alone.low


def test_what_cannot_be_fitted():
    with pytest.raises(ConfigurationError, match="samples is empty"):
        fit_servers([])
    with pytest.raises(ConfigurationError, match="throughput is 0"):
        fit_servers([ServerSample(ServerShape(1, 1), 0.0)])
    with pytest.raises(ConfigurationError, match="form is 'other'"):
        fit_servers([ServerSample(ServerShape(1, 1), 1.0)], "other")


def test_a_time_that_no_model_describes_is_refused():
    """A fit without a column ended the process."""
    endless = ServerSample(ServerShape(2, 1, 4.0, 4.0, BATCH), 5e-324)
    with pytest.raises(ConfigurationError, match="a step takes inf to inf s"):
        fit_servers([endless, endless])
