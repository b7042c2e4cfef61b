"""What all throughput models share: predictions with an interval, and limits of their trust.

The models are in ``dlrover.planning.parameter_server`` and ``dlrover.planning.allreduce``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from dlrover.errors import ConfigurationError
from dlrover.spec.plan import Effect

NOISE = 0.1
"""Relative noise of a step time that fits assume, as one deviation."""
OUTLIER = 1.0
"""Deviations above which a sample is an outlier rather than noise."""
WORST = 3.0
"""Maximum deviations that an outlier counts for in the noise."""


@dataclass(frozen=True)
class SpeedPrediction:
    """A throughput with its interval, in samples per second."""

    throughput: float
    low: float
    high: float
    confidence: float
    spread: float
    """Relative standard deviation of the predicted mean, which further samples can reduce."""

    def effect(self, *, before: float = 0.0, cost: float = 0.0) -> Effect:
        """Return the prediction as the predicted effect of a plan."""
        return Effect(
            throughput=self.throughput,
            low=self.low,
            high=self.high,
            confidence=self.confidence,
            before=before,
            cost=cost,
        )


class CandidateShape(Protocol):
    """A size that a job can have."""

    NAMES: ClassVar[tuple[str, ...]]
    """Names of the axes."""

    def axes(self) -> tuple[float, ...]:
        """Return what can be changed about it, as positive numbers."""
        ...


@dataclass(frozen=True)
class TrustRegion:
    """Limit of a plan's distance from what was measured: a factor on each axis.

    A correct prediction widens the region, a wrong one narrows it.
    """

    factor: float = 2.0
    """Maximum factor between a plan and a measured shape on each axis, up or down."""
    least: float = 1.25
    most: float = 4.0

    def __post_init__(self) -> None:
        if not 1.0 < self.least <= self.factor <= self.most:
            raise ConfigurationError(
                f"factor is {self.factor}: it must lie between least ({self.least}), "
                f"which is above 1, and most ({self.most})"
            )

    def contains(self, shape: CandidateShape, measured: Iterable[CandidateShape]) -> bool:
        """Return whether a measured shape is near enough on every axis.

        One more unit of an axis is always near: from one worker, two can be tried.
        """
        return any(self.near(shape.axes(), other.axes()) for other in measured)

    def after(self, *, within: bool) -> TrustRegion:
        """Return the region after a plan was measured, ``within`` its predicted interval or not."""
        factor = self.factor**2 if within else math.sqrt(self.factor)
        return replace(self, factor=min(self.most, max(self.least, factor)))

    def near(self, axes: Sequence[float], others: Sequence[float]) -> bool:
        """Return whether the values of some axes are near others."""
        limit = self.factor * (1 + 1e-9)
        return all(
            abs(a - b) <= 1 or max(a, b) <= limit * min(a, b)
            for a, b in zip(axes, others, strict=True)
        )


def interval(
    throughput: float, *, spread: float, deviation: float, quantile: float, confidence: float
) -> SpeedPrediction:
    """Return a prediction whose logarithm has a symmetric interval.

    Args:
        throughput: Samples per second.
        spread: Relative standard deviation of the mean.
        deviation: Relative standard deviation of one measurement: the mean's and the noise's together.
        quantile: Deviations that the interval reaches to each side.
        confidence: Share of measurements that should lie in it.
    """
    reach = math.exp(min(quantile * deviation, 50.0))
    return SpeedPrediction(throughput, throughput / reach, throughput * reach, confidence, spread)
