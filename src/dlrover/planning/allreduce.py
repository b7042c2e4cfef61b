"""Throughput of all-reduce jobs: computation and network time, partly overlapped.

With ``K`` replicas, ``b`` samples per replica and pass, and ``passes`` passes per step::

    compute = ac + bc * b
    network = 0                                              for K = 1
    network = an + bn * (K - 2) / K + cn * (K - 2)           on several nodes
    network = ar + br * (K - 2) / K                          on one node
    time    = (compute^g + network^g)^(1/g) + (passes - 1) * compute,    1 <= g <= 10

This is the form of Pollux (OSDI 2021), except for the network: Pollux has ``an + bn * (K - 2)`` and
``ar + br * (K - 2)``. A ring moves ``2 (K - 1) / K`` of the gradients through each link, whatever ``K``
is, and only its latency grows with ``K``: so a fit on few replicas says what many will do. ``form="pollux"``
is the published form.

The parameters are fitted as logarithms. Weak priors replace special cases for what has not been measured
yet: a network that no sample has shown has a wide interval. Needs numpy and scipy (extra ``planning``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from scipy.optimize import least_squares
from scipy.special import stdtrit

from dlrover.errors import ConfigurationError
from dlrover.planning.throughput import NOISE, OUTLIER, WORST, SpeedPrediction, interval

Form = Literal["ring", "pollux"]

NOISE_WEIGHT = 5.0
"""Number of samples that the assumed noise counts for."""
NUDGE = 1e-6
"""Change of the parameters, which are logarithms, that measures a slope."""
REPLICAS_ERROR, NODES_ERROR = 0.06, 0.12
"""Relative error of the form itself for each doubling beyond the largest measured number."""
FIRST_NETWORK = 0.5
"""Expected network time before it was measured, relative to the computation.

The value is rather too low: a size that is tried and turns out slow gets measured, one never tried
stays unknown.
"""
DRAWS = 128
"""Half the number of parameter sets per prediction."""
FARAWAY = -18.0
"""Logarithm of a negligible time."""

AC, BC, AN, BN, CN, AR, BR, G = range(8)


@dataclass(frozen=True)
class RingShape:
    """The size of an all-reduce job."""

    NAMES: ClassVar[tuple[str, ...]] = ("nodes", "replicas", "samples per replica")

    nodes: int
    replicas: int
    batch: int
    """Samples of one replica in one pass."""
    passes: int = 1
    """Passes before the gradients are exchanged."""

    def axes(self) -> tuple[float, ...]:
        """Return what a plan can change."""
        return (self.nodes, self.replicas, self.batch * self.passes)


@dataclass(frozen=True)
class RingSample:
    """A measured step."""

    shape: RingShape
    step_seconds: float
    """Seconds of a step of one pass."""
    compute_seconds: float | None = None
    """Seconds of the pass alone; None if not measured."""


@dataclass(frozen=True)
class RingModel:
    """A fitted model."""

    form: Form
    parameters: Any
    """Logarithms of the eight parameters; the last one is the logit of (g - 1) / 9."""
    covariance: Any
    noise: float
    freedom: float
    samples: tuple[RingSample, ...]
    prior: tuple[Any, Any]
    """Expected parameters: the centre, and the rows that pull there."""

    @property
    def replicas(self) -> int:
        """The largest measured number of replicas."""
        return max(sample.shape.replicas for sample in self.samples)

    def step_time(self, nodes: Any, replicas: Any, batch: Any, passes: Any = 1) -> Any:
        """Return the seconds of a step, for numbers or arrays of matching shape."""
        step, compute = _log_times(self.parameters, self.form, nodes, replicas, batch)
        return np.exp(step) + (np.asarray(passes) - 1) * np.exp(compute)

    def throughput_of(self, nodes: Any, replicas: Any, batch: Any, passes: Any = 1) -> Any:
        """Return samples per second, for numbers or arrays of matching shape."""
        return replicas * batch * passes / self.step_time(nodes, replicas, batch, passes)

    def predict(self, shape: RingShape, confidence: float = 0.9) -> SpeedPrediction:
        """Predict a shape's throughput, with an interval that holds ``confidence`` of the measurements."""
        where = (shape.nodes, shape.replicas, shape.batch, shape.passes)
        spread = math.sqrt(self._variance(where) + self._beyond(shape) ** 2)
        quantile = float(stdtrit(self.freedom, 0.5 + confidence / 2))
        found = interval(
            float(self.throughput_of(*where)),
            spread=spread,
            deviation=math.hypot(spread, self.noise),
            quantile=quantile,
            confidence=confidence,
        )
        return replace(found, high=min(found.high, self._without_network(shape, quantile)))

    def _without_network(self, shape: RingShape, quantile: float) -> float:
        """Return the samples per second without any network time; only noise can exceed them."""
        _, compute = _log_times(self.parameters, self.form, 1, 1, shape.batch)
        return shape.replicas * shape.batch / math.exp(float(compute) - quantile * self.noise)

    def refit(self, *samples: RingSample) -> RingModel:
        """Fit the model to more samples, starting from this one."""
        return fit_ring([*self.samples, *samples], self.form, start=self)

    def _beyond(self, shape: RingShape) -> float:
        """Return the expected relative error of the form outside of what was measured."""
        nodes = max(sample.shape.nodes for sample in self.samples)
        more_replicas = max(0.0, math.log2(shape.replicas / self.replicas))
        more_nodes = max(0.0, math.log2(shape.nodes / nodes))
        return math.hypot(REPLICAS_ERROR * more_replicas, NODES_ERROR * more_nodes)

    def _variance(self, where: tuple[int, int, int, int]) -> float:
        """Return the variance of the step time's logarithm that stems from the parameters' uncertainty."""
        draws, weights = self._draws
        nodes, replicas, batch, passes = where
        step, compute = _log_times(draws, self.form, nodes, replicas, batch)
        times = np.log(np.exp(step) + (passes - 1) * np.exp(compute))
        centre = math.log(float(self.step_time(*where)))
        return float(weights @ (times - centre) ** 2)

    @cached_property
    def _draws(self) -> tuple[Any, Any]:
        """Parameters that fit the samples about as well, one set per column, and their weights.

        They are drawn from the normal distribution around the best ones and weighted by how well they fit.
        That distribution alone knows only slopes; but a network that was hidden behind the computation may
        be much slower than expected, and not much faster.
        """
        normal = np.random.default_rng(0).standard_normal((DRAWS, len(self.parameters)))
        normal = np.concatenate([normal, -normal])
        draws = self.parameters + normal @ np.linalg.cholesky(self.covariance).T
        costs = _costs(draws, self.form, _Table(self.samples), self.prior)
        logs = (np.sum(normal**2, axis=1) - costs) / 2
        weights = np.exp(logs - logs.max())
        return draws.T, weights / weights.sum()


def fit_ring(
    samples: Sequence[RingSample],
    form: Form = "ring",
    *,
    start: RingModel | None = None,
) -> RingModel:
    """Fit the logarithms of step and compute times: least squares near the fit, and far less for an outlier.

    Args:
        samples: Measured steps.
        form: The network's part.
        start: A model with similar parameters, which makes the fit faster.

    Raises:
        ConfigurationError: There is no sample, or a time is not a positive number.
    """
    if not samples:
        raise ConfigurationError("samples is empty: a fit needs at least one")
    table = _Table(samples)
    around = _prior(form, table)
    first = around[0] if start is None else start.parameters
    found = least_squares(
        lambda p: _residuals(p, form, table, around),
        first,
        lambda p: _slopes(p, form, table, around),
        method="lm",
        xtol=1e-6,
        ftol=1e-6,
    )
    missed = np.clip(_missed(found.x, form, table)[0], -WORST, WORST)
    freedom = len(samples) + NOISE_WEIGHT
    noise = NOISE * math.sqrt((float(missed @ missed) + NOISE_WEIGHT) / freedom)
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return RingModel(form, found.x, covariance, noise, freedom, tuple(samples), around)


class _Table:
    """Samples as arrays."""

    def __init__(self, samples: Sequence[RingSample]) -> None:
        rows = np.array([_row(sample) for sample in samples])
        self.nodes, self.replicas, self.batch, self.step, compute = rows.T
        self.known = np.isfinite(compute)
        self.compute = np.where(self.known, compute, self.step)
        self.log_step, self.log_compute = np.log(self.step), np.log(self.compute)


def _row(sample: RingSample) -> tuple[float, ...]:
    compute = math.nan if sample.compute_seconds is None else sample.compute_seconds
    for name, seconds in (("step_seconds", sample.step_seconds), ("compute_seconds", compute)):
        if seconds <= 0 or math.isinf(seconds):
            raise ConfigurationError(f"{name} is {seconds}: it must be a positive number")
    shape = sample.shape
    return (shape.nodes, shape.replicas, shape.batch, sample.step_seconds, compute)


def _residuals(parameters: Any, form: Form, table: _Table, prior: tuple[Any, Any]) -> Any:
    """Return the misses of samples and prior, in deviations; for samples, the roots of their losses."""
    missed, known = _missed(parameters, form, table), np.ones_like(table.known)
    centre, pull = prior
    found = _rooted(missed)[np.stack([known, table.known])]
    return np.concatenate([found, pull @ (parameters - centre)])


def _slopes(parameters: Any, form: Form, table: _Table, prior: tuple[Any, Any]) -> Any:
    """Return the Jacobian of `_residuals`, by differences of all parameters at once."""
    nudges = np.column_stack([np.zeros_like(parameters), np.eye(len(parameters)) * NUDGE])
    moved = _rooted(_missed((parameters[:, None] + nudges)[:, :, None], form, table))
    slopes = (moved[:, 1:] - moved[:, :1]) / NUDGE
    step, compute = slopes.transpose(0, 2, 1)
    return np.concatenate([step, compute[table.known], prior[1]])


def _costs(draws: Any, form: Form, table: _Table, prior: tuple[Any, Any]) -> Any:
    """Return the sum of the squares of `_residuals` for many sets of parameters at once, one per row."""
    step, compute = _rooted(_missed(draws.T[:, :, None], form, table))
    centre, pull = prior
    squares = np.sum(step**2, axis=1) + np.sum(compute[:, table.known] ** 2, axis=1)
    return squares + np.sum(((draws - centre) @ pull.T) ** 2, axis=1)


def _missed(parameters: Any, form: Form, table: _Table) -> Any:
    """Return by how many deviations step and compute times are missed."""
    step, compute = _log_times(parameters, form, table.nodes, table.replicas, table.batch)
    return np.stack([step - table.log_step, compute - table.log_compute]) / NOISE


def _rooted(missed: Any) -> Any:
    """Return each loss's root: the deviation near the fit, its root far away (Charbonnier, pseudo-Huber).

    The minimised squares of outliers then grow in proportion to their deviations, not to their squares.
    """
    return missed * np.sqrt(2 / (1 + np.sqrt(1 + (missed / OUTLIER) ** 2)))


def _prior(form: Form, table: _Table) -> tuple[Any, Any]:
    """Return the expected parameters, and the rows that pull the fit there.

    A row is a combination of parameters, divided by its expected deviation. Slopes are expected in proportion
    to the constant of the same network.
    """
    rows = np.eye(8)
    log_compute = math.log(float(np.median(table.compute)))
    half, log_batch = log_compute - math.log(2), math.log(float(np.median(table.batch)))
    network = log_compute + math.log(FIRST_NETWORK)
    slope = math.log(0.5) if form == "ring" else math.log(0.1)
    latency = math.log(0.003) if form == "ring" else FARAWAY
    centre = np.array(
        [
            half,
            half - log_batch,
            network,
            network + slope,
            network + latency,
            network,
            network + slope,
            -1.0,
        ]
    )
    rows[BN, AN] = rows[CN, AN] = rows[BR, AR] = -1.0
    deviations = np.array([3.0, 3.0, 2.0, 1.0, 1.0, 2.0, 1.0, 1.5])
    return centre, rows / deviations[:, None]


def _log_times(parameters: Any, form: Form, nodes: Any, replicas: Any, batch: Any) -> Any:
    """Return the logarithms of the seconds of a step of one pass and of its computation."""
    nodes, replicas = np.asarray(nodes, dtype=float), np.asarray(replicas, dtype=float)
    ac, bc, an, bn, cn, ar, br = np.exp(parameters[:G])
    overlap = 1 + 9 / (1 + np.exp(-parameters[G]))
    compute = ac + bc * np.asarray(batch)
    more = np.maximum(replicas - 2, 0.0)
    share = more / np.maximum(replicas, 1.0) if form == "ring" else more
    between = an + bn * share + cn * more
    network = np.where(nodes > 1, between, np.where(replicas > 1, ar + br * share, 1e-9))
    longer, shorter = np.maximum(compute, network), np.minimum(compute, network)
    step = np.log(longer) + np.log1p((shorter / longer) ** overlap) / overlap
    return step, np.log(compute)
