"""Sizes that were measured, which take precedence over what a model predicts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from dlrover.master.machine.scaling.changes import Question, decided, direction, told_change
from dlrover.master.scaling.precedent import Precedent
from dlrover.planning.search import Choice, worth
from dlrover.planning.throughput import Prediction
from dlrover.spec.plan import Effect
from dlrover.spec.roles import Size
from dlrover.spec.speed import ScaleDecision, ScaleKind, SpeedSample

SPREAD = 0.2
"""Relative deviation within which a measured speed is expected to recur."""


def means(samples: Sequence[SpeedSample]) -> dict[Size, float]:
    """Return the mean throughput by size."""
    found: dict[Size, list[float]] = {}
    for sample in samples:
        found.setdefault(sample.size, []).append(sample.throughput)
    return {size: mean(values) for size, values in found.items()}


def to_measure(
    current: SpeedSample, target: Size, before: float, after: Prediction
) -> ScaleDecision:
    """Return the decision to try a size that nothing rules out; ``before`` is the present throughput."""
    reason = (
        f"{told_change(current.size, target)}: to be measured, "
        "because no measurement rules out that it is the best size"
    )
    effect = after.effect(before=before, cost=current.cost(target))
    return decided(ScaleKind.MEASURE, target, reason, effect)


def best_known(
    known: Mapping[Size, float], asked: Question, choice: Choice, past: Precedent | None = None
) -> ScaleDecision | None:
    """Return a better size that this job or a similar one has measured; None if there is none.

    ``known`` is the throughput by size that the job itself has measured, including the present size;
    ``past`` is the similar job.
    """
    current = asked.current
    seen = {**past.throughput, **known} if past is not None else known
    allowed = [
        size for size in seen if size.workers in asked.sizes and size.servers in asked.servers
    ]
    if not allowed:
        return None

    def value(size: Size, throughput: float) -> float:
        return worth(throughput, current.cost(size), choice)

    best = max(allowed, key=lambda size: value(size, seen[size]))
    here = known[current.size]
    if value(best, seen[best]) <= (1 + choice.gain) * value(current.size, here):
        return None
    faster, dearer = seen[best] / here - 1, current.cost(best) / current.cost(current.size) - 1
    by = "" if best in known or past is None else f" by the similar job {past.name}"
    reason = (
        f"{told_change(current.size, best)}: {faster:+.0%} throughput for {dearer:+.0%} cost, "
        f"as it was measured before{by}"
    )
    effect = Effect(
        throughput=seen[best],
        low=seen[best] * (1 - SPREAD),
        high=seen[best] * (1 + SPREAD),
        before=here,
        cost=current.cost(best),
    )
    return decided(direction(current.size, best), best, reason, effect)
