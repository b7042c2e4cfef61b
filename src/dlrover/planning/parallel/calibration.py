"""The time model's coefficients from measured steps. Needs numpy and scipy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.accelerators import accelerator
from dlrover.planning.parallel.columns import Columns
from dlrover.planning.parallel.records import (
    Cluster,
    Observation,
    Strategy,
    Transformer,
    is_number,
)
from dlrover.planning.parallel.residuals import factors, kinds, medians
from dlrover.planning.parallel.rules import PlannedJob
from dlrover.planning.parallel.timing import timed

PRIOR = 0.01
"""Weight of the present coefficients: as much as an observation weighs whose error is this small."""
LEAST = 0.1
"""Coefficient that a present one counts as, if it is smaller: one of 0 says that it was not seen, not that there is no such time."""
ROUNDS = 10
"""Fits, each with the terms that count at the last one's coefficients."""
NOISE = 0.05
"""Relative error from which an observation counts less, as noise or a fault of its run."""
LEAST_SPREAD = 0.05
"""Relative error that the fit never promises to stay below."""


def calibrate(cluster: Cluster, observations: Iterable[Any]) -> Cluster:
    """Return the cluster with coefficients fitted to measured steps, and the residuals of the measured kinds of runs.

    The fit is one of non-negative least squares of relative errors. What most runs of a kind take longer than the fit
    says is the residual of this kind. Coefficients and residuals that the observations say nothing about stay as they are.

    Args:
        cluster: The accelerators that were measured.
        observations: Each an :class:`Observation`, or a tuple or mapping of its five fields.

    Raises:
        ConfigurationError: there are none, or one is not complete.
    """
    seen = [_observation(each) for each in observations]
    if not seen:
        raise ConfigurationError("calibrate: there are no observations: at least one is needed.")
    start = np.asarray(cluster.coefficients or accelerator(cluster.accelerator).coefficients)
    measured = np.array([each.step_seconds for each in seen], dtype=float)
    weights, design = start, _design(cluster, seen, start)
    for _ in range(ROUNDS):
        found = _fit(design, measured, weights, start)
        # halfway, in ratios: the terms that count depend on the coefficients
        least = 1e-4 * np.maximum(start, LEAST)
        weights = np.sqrt(np.maximum(found, least) * np.maximum(weights, least))
        design = _design(cluster, seen, weights)
    weights = _fit(design, measured, weights, start)
    predicted = _design(cluster, seen, weights) @ weights
    of = Columns.of([each.strategy for each in seen])
    known = (*cluster.residuals, *medians(kinds(of, cluster), measured / predicted))
    fitted = replace(
        cluster,
        coefficients=tuple(float(weight) for weight in weights),
        residuals=tuple({each[:3]: each for each in known}.values()),
    )
    errors = np.abs(predicted * factors(of, fitted) / measured - 1)
    # few observations say little about the errors of others
    spread = np.quantile(errors, 0.85) * (1 + len(start) / (2 * len(seen)))
    return replace(fitted, spread=float(max(spread, LEAST_SPREAD)))


def _observation(each: Any) -> Observation:
    try:
        seen = Observation(**each) if isinstance(each, Mapping) else Observation(*each)
    except TypeError as error:
        raise ConfigurationError(
            f"calibrate: an observation has not the fields {', '.join(Observation._fields)}."
        ) from error
    for name, kind in (("model", Transformer), ("strategy", Strategy)):
        if not isinstance(getattr(seen, name), kind):
            raise ConfigurationError(
                f"calibrate: {name} is {getattr(seen, name)!r}, not a {kind.__name__}."
            )
    if not (is_number(seen.step_seconds) and seen.step_seconds > 0):
        raise ConfigurationError(
            f"calibrate: step_seconds is {seen.step_seconds!r}, not a positive number."
        )
    return seen


def _design(cluster: Cluster, seen: Sequence[Observation], weights: Any) -> Any:
    """Ideal seconds of each term, one row per observation."""
    jobs: dict[PlannedJob, list[int]] = {}
    for index, each in enumerate(seen):
        nodes = max(1, each.strategy.size // cluster.per_node)
        job = PlannedJob(
            each.model, replace(cluster, nodes=nodes), each.sequence, each.global_batch
        )
        jobs.setdefault(job, []).append(index)
    rows = np.zeros((len(seen), len(weights)))
    for job, places in jobs.items():
        of = Columns.of([seen[at].strategy for at in places])
        rows[places] = timed(
            job.model, of, job.cluster, job.sequence, job.global_batch, weights
        ).design
    return rows


def _fit(design: Any, measured: Any, weights: Any, start: Any) -> Any:
    """Coefficients of least relative errors; large errors count less, as in a fit of absolute errors."""
    off = np.abs(np.log(np.maximum(design @ weights, 1e-12) / measured))
    scale = 1 / (measured * np.sqrt(np.maximum(off, NOISE) * len(measured)))
    prior = PRIOR / np.maximum(start, LEAST)
    rows = np.vstack([design * scale[:, None], np.diag(prior)])
    fitted, _ = nnls(rows, np.concatenate([measured * scale, prior * start]))
    return fitted
