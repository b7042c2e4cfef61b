"""Why a strategy is not taken, and the cheapest change after which it would fit. Needs numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dlrover.planning.parallel.columns import Columns
from dlrover.planning.parallel.predict import predict, predict_all
from dlrover.planning.parallel.records import (
    RECOMPUTE,
    Cluster,
    Prediction,
    Strategy,
    Transformer,
)
from dlrover.planning.parallel.rules import PlannedJob, obeys
from dlrover.planning.parallel.search import fitting

DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
FACTORS = (2, 4, 8, 16)
"""Factors by which a mend multiplies one degree and divides another."""


@dataclass(frozen=True)
class Explanation:
    """Why a strategy is not taken."""

    reason: str
    """The first rule broken, with its numbers; if none is, how much faster the best strategy is."""
    mend: str
    """The cheapest change after which the strategy fits; empty if it fits, or if no change is enough."""
    strategy: Strategy | None
    """The strategy with this change, or the best one if the given one fits."""
    prediction: Prediction
    """Of the given strategy."""

    def __str__(self) -> str:
        return f"{self.reason} {self.mend}".strip()


def why_not(
    model: Transformer, strategy: Strategy, cluster: Cluster, *, sequence: int, global_batch: int
) -> Explanation:
    """Return the first rule that a strategy breaks and the cheapest mend, or what makes others faster.

    Args:
        model: The model's shape.
        strategy: The strategy in question.
        cluster: The accelerators that run it.
        sequence: Tokens of a sequence.
        global_batch: Sequences of a step, on all ranks together.

    Raises:
        ConfigurationError: the accelerator is unknown, or a number is not positive.
    """
    job = PlannedJob(model, cluster, sequence, global_batch, strategy.precision)
    now = predict(model, strategy, cluster, sequence=sequence, global_batch=global_batch)
    if now.fits:
        return _slower(job, strategy, now)
    for changes in (1, 2):
        mended = _fastest(job, _changed(strategy, changes))
        if mended is not None:
            return Explanation(now.reason, _mend(job, strategy, mended, now), mended, now)
    found = fitting(job)
    if not found:
        return Explanation(now.reason, "No strategy fits this cluster.", None, now)
    best, predicted = found[0]
    mend = f"No small change is enough: the best strategy is {described(best)}, {_speed(now, predicted)}."
    return Explanation(now.reason, mend, best, now)


def described(strategy: Strategy) -> str:
    """Return the fields of a strategy that differ from the defaults."""
    default = vars(Strategy())
    fields = [f"{name}={value}" for name, value in vars(strategy).items() if value != default[name]]
    return ", ".join(fields) or "the default"


def _slower(job: PlannedJob, strategy: Strategy, now: Prediction) -> Explanation:
    """What is faster than a strategy that fits."""
    found = fitting(job)
    if not found or found[0][1].step_seconds >= now.step_seconds:
        return Explanation("It fits, and no strategy is predicted to be faster.", "", strategy, now)
    best, predicted = found[0]
    gain = 100 * (now.step_seconds / predicted.step_seconds - 1)
    reason = f"It fits, but {described(best)} is predicted to be {gain:.0f} % faster."
    return Explanation(reason, "", best, now)


def _fastest(job: PlannedJob, strategies: Iterable[Strategy]) -> Strategy | None:
    """The fastest of some strategies that obeys the rules and fits."""
    unique = list(dict.fromkeys(strategies))
    if not unique:
        return None
    of = Columns.of(unique)
    rated = predict_all(job, of)
    good = np.flatnonzero(rated.fits & obeys(job, of))
    if not len(good):
        return None
    # nothing that changes the optimizer, unless nothing else helps
    order = np.lexsort((rated.seconds[good], of.optimizer_bytes[good] < 12))
    return unique[int(good[order[0]])]


def _mend(job: PlannedJob, strategy: Strategy, mended: Strategy, now: Prediction) -> str:
    then = predict(
        job.model, mended, job.cluster, sequence=job.sequence, global_batch=job.global_batch
    )
    before, after = vars(strategy), vars(mended)
    changes = [
        f"{name} {value} -> {after[name]}" for name, value in before.items() if after[name] != value
    ]
    return f"{', '.join(changes)}: {then.memory_gib:.1f} GiB, {_speed(now, then)}."


def _speed(now: Prediction, then: Prediction) -> str:
    change = 100 * (now.step_seconds / then.step_seconds - 1)
    return f"{change:+.0f} % speed"


def _changed(strategy: Strategy, times: int) -> Iterator[Strategy]:
    """Strategies that differ by some changes."""
    if times == 1:
        yield from _one_change(strategy)
        return
    for once in _one_change(strategy):
        yield from _changed(once, times - 1)


def _one_change(strategy: Strategy) -> Iterator[Strategy]:
    """Strategies that differ in one way."""
    options: dict[str, list[Any]] = {
        "precision": ["bf16"] if strategy.precision == "fp8" else [],
        "recompute": list(RECOMPUTE[RECOMPUTE.index(strategy.recompute) + 1 :]),
        "chunked_loss": [True],
        "offload": [True],
        "optimizer_bytes": [6],
        "zero": list(range(strategy.zero + 1, 4)),
        "virtual": [1, *(strategy.virtual // factor for factor in FACTORS)],
        "ep": [strategy.ep // factor for factor in FACTORS]
        + [strategy.ep * factor for factor in FACTORS if strategy.ep > 1],
        "micro_batch": [strategy.micro_batch // factor for factor in FACTORS],
    }
    for name, values in options.items():
        for value in values:
            if value and value != getattr(strategy, name):
                yield replace(strategy, **{name: value})
    for more, less in itertools.permutations(DEGREES, 2):
        for factor in FACTORS:
            a, b = getattr(strategy, more), getattr(strategy, less)
            if b % factor == 0:
                yield replace(strategy, **{more: a * factor, less: b // factor})
    # a wrong number of ranks: another number of replicas
    for name in DEGREES:
        for factor in FACTORS:
            value = getattr(strategy, name)
            yield replace(strategy, **{name: value * factor})
            if value % factor == 0:
                yield replace(strategy, **{name: value // factor})
