"""Throughput of parameter-server jobs: step time as a sum of terms with non-negative coefficients.

Four published forms share this shape, with ``w`` workers, ``p`` servers, ``m`` samples per worker and
step, and ``cw`` and ``cp`` cores per worker and server. The throughput is always ``m * w / time``.

==================  =====================================================  ==========================
form                columns of the time of a step                          source
==================  =====================================================  ==========================
``dlrover-rm``      ``m/cw, w/(p*cp), w/p, m/p, 1``                        DLRover-RM (VLDB 2024)
``optimus-async``   ``w/p, w, p, 1``                                       Optimus (EuroSys 2018)
``optimus-sync``    ``m, w/p, w, p, 1``                                    Optimus (EuroSys 2018)
``queue``           ``m/cw, m/(p*cp), m*(w-1)/(p*cp), 1``                  balanced job bounds (1982)
==================  =====================================================  ==========================

The last form models servers as queues: a request waits for those of the other workers, which are spread over
the servers (Zahorjan, Sevcik, Eager and Galler, Communications of the ACM 25(2)).

Needs numpy and scipy (extra ``planning``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from scipy.optimize import nnls
from scipy.special import stdtrit

from dlrover.errors import ConfigurationError
from dlrover.planning.throughput import NOISE, OUTLIER, WORST, SpeedPrediction, interval

Form = Literal["dlrover-rm", "optimus-async", "optimus-sync", "queue"]

LEAST_NOISE = 0.01
"""Minimum relative noise: no fit is trusted to be better."""
PRIOR_NOISE, PRIOR_WEIGHT = 0.05, 2.0
"""Noise assumed before there are samples, and the number of samples that the assumption counts for."""
PASSES = 12
"""Times that a fit is linearised and its samples weighted by how far it missed them (pseudo-Huber loss)."""
COLLINEAR = 1 - 1e-9
SHORTEST = 0.1
"""Minimum step time, as a share of the shortest measured step."""


@dataclass(frozen=True)
class ServerShape:
    """The size of a parameter-server job."""

    NAMES: ClassVar[tuple[str, ...]] = (
        "workers",
        "servers",
        "cores per worker",
        "cores per server",
    )

    workers: int
    servers: int
    worker_cpu: float = 1.0
    """Cores of each worker."""
    server_cpu: float = 1.0
    """Cores of each server."""
    batch: int = 1
    """Samples of one worker in one step."""

    def axes(self) -> tuple[float, ...]:
        """Return what a plan can change."""
        return (self.workers, self.servers, self.worker_cpu, self.server_cpu)


@dataclass(frozen=True)
class ServerSample:
    """A measured throughput."""

    shape: ServerShape
    throughput: float
    """Samples per second of all workers."""


@dataclass(frozen=True)
class ServerModel:
    """A fitted model. Times are in seconds."""

    form: Form
    coefficients: Any
    """One per column; 0 for a column that the samples cannot tell from an earlier one."""
    covariance: Any
    """Covariance of the coefficients, including columns that the samples do not distinguish."""
    noise: float
    """Relative standard deviation of one measurement."""
    freedom: float
    """Degrees of freedom of the noise."""
    samples: tuple[ServerSample, ...]

    def throughput_of(
        self, workers: Any, servers: Any, worker_cpu: Any, server_cpu: Any, batch: Any
    ) -> Any:
        """Return samples per second, for numbers or arrays of matching shape."""
        return (
            batch
            * workers
            / self._times(_columns(self.form, workers, servers, worker_cpu, server_cpu, batch))
        )

    def _times(self, rows: Any) -> Any:
        """Return the seconds of a step, limited below: terms may all be zero where nothing was measured."""
        shortest = min(s.shape.batch * s.shape.workers / s.throughput for s in self.samples)
        return np.maximum(rows @ self.coefficients, SHORTEST * shortest)

    def spread_of(
        self, workers: Any, servers: Any, worker_cpu: Any, server_cpu: Any, batch: Any
    ) -> Any:
        """Return the predicted mean's relative standard deviation, for numbers or arrays of like shape."""
        rows = _columns(self.form, workers, servers, worker_cpu, server_cpu, batch)
        variance = np.sum((rows @ self.covariance) * rows, axis=-1)
        return np.sqrt(np.maximum(variance, 0.0)) / self._times(rows)

    def predict(self, shape: ServerShape, confidence: float = 0.9) -> SpeedPrediction:
        """Predict a shape's throughput, with an interval that holds ``confidence`` of the measurements."""
        where = (*shape.axes(), shape.batch)
        spread = float(self.spread_of(*where))
        return interval(
            float(self.throughput_of(*where)),
            spread=spread,
            deviation=math.hypot(spread, self.noise),
            quantile=float(stdtrit(self.freedom, 0.5 + confidence / 2)),
            confidence=confidence,
        )

    def refit(self, *samples: ServerSample) -> ServerModel:
        """Fit the model to more samples."""
        return fit_servers([*self.samples, *samples], self.form)


def fit_servers(samples: Sequence[ServerSample], form: Form = "dlrover-rm") -> ServerModel:
    """Fit logarithms of step times with non-negative coefficients; outliers count less than their squares.

    A column that is a multiple of an earlier one in all samples is left out, but its uncertainty is
    kept: a plan that would tell the two apart gets a wide interval.

    Raises:
        ConfigurationError: There is no sample, or one is not a positive number.
    """
    if not samples:
        raise ConfigurationError("samples is empty: a fit needs at least one")
    for sample in samples:
        if not (math.isfinite(sample.throughput) and sample.throughput > 0):
            raise ConfigurationError(
                f"throughput is {sample.throughput}: it must be a positive number"
            )
    rows = _rows(form, [sample.shape for sample in samples])
    times = np.array([s.shape.batch * s.shape.workers / s.throughput for s in samples])
    relative, target, weights = rows / times[:, None], np.ones(len(times)), np.ones(len(times))
    kept = _independent(relative)
    if not len(kept):  # scipy ends the process where there is no column
        raise ConfigurationError(
            f"a step takes {times.min():g} to {times.max():g} s: no model describes such times"
        )
    coefficients = np.zeros(rows.shape[1])
    for _ in range(PASSES):
        roots = np.sqrt(weights)
        coefficients[kept] = nnls(relative[:, kept] * roots[:, None], target * roots)[0]
        fitted = np.maximum(rows @ coefficients, SHORTEST * times.min())
        left = np.log(times / fitted)
        relative, target = rows / fitted[:, None], 1 + left
        weights = 1 / np.sqrt(1 + (left / (NOISE * OUTLIER)) ** 2)
    left = np.clip(left, -WORST * NOISE, WORST * NOISE)
    active = int(np.count_nonzero(coefficients))
    freedom = max(len(times) - active, 0) + PRIOR_WEIGHT
    noise = math.sqrt((float(left @ left) + PRIOR_WEIGHT * PRIOR_NOISE**2) / freedom)
    noise = max(noise, LEAST_NOISE)
    usual = np.median(relative, axis=0)  # its inverse: a column that alone makes up the whole time
    # No sample has it: like a constant.
    usual = np.where(usual > 0, usual, np.median(relative[:, 0]))
    precision = (relative.T * weights) @ relative / noise**2 + np.diag(usual**2.0)
    covariance = np.linalg.inv(precision)
    return ServerModel(form, coefficients, covariance, noise, freedom, tuple(samples))


def _rows(form: Form, shapes: Sequence[ServerShape]) -> Any:
    values = np.array(
        [(s.workers, s.servers, s.worker_cpu, s.server_cpu, s.batch) for s in shapes], dtype=float
    )
    return _columns(form, *values.T)


def _columns(form: Form, w: Any, p: Any, cw: Any, cp: Any, m: Any) -> Any:
    """Return the terms of shapes: one row per shape, one column per term."""
    one = np.ones_like(np.asarray(w, dtype=float))
    terms: tuple[Any, ...]
    if form == "dlrover-rm":
        terms = (one, m / cw, w / (p * cp), w / p, m / p)
    elif form == "optimus-async":
        terms = (one, w / p, w * one, p * one)
    elif form == "optimus-sync":
        terms = (one, m * one, w / p, w * one, p * one)
    elif form == "queue":
        terms = (one, m / cw, m / (p * cp), m * (w - 1) / (p * cp))
    else:
        raise ConfigurationError(
            f"form is {form!r}: accepted are dlrover-rm, optimus-async, optimus-sync and queue"
        )
    return np.stack([np.broadcast_to(term, one.shape) for term in terms], axis=-1)


def _independent(columns: Any) -> list[int]:
    """Return the columns that are neither zero nor a multiple of an earlier one."""
    lengths = np.linalg.norm(columns, axis=0)
    units = columns / np.where(lengths > 0, lengths, 1.0)
    kept: list[int] = []
    for index in np.flatnonzero(lengths).tolist():
        if all(float(units[:, index] @ units[:, other]) < COLLINEAR for other in kept):
            kept.append(index)
    return kept
