"""What every throughput model shares: predictions with an interval, and how far to trust them.

The models are in ``dlrover.planning.parameter_server`` and ``dlrover.planning.allreduce``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from dlrover.errors import ConfigurationError
from dlrover.spec.plan import Effect

NOISE = 0.1
"""Relative noise of a step time that fits assume: one deviation."""
OUTLIER = 1.0
"""Deviations beyond which a sample is rather an outlier than noise."""
WORST = 3.0
"""Deviations that an outlier counts for in the noise, at most."""


@dataclass(frozen=True)
class Prediction:
    """A throughput with its interval, in samples per second."""

    throughput: float
    low: float
    high: float
    confidence: float
    spread: float
    """Relative standard deviation of the predicted mean: what the next samples can take away."""

    def effect(self, *, before: float = 0.0, cost: float = 0.0) -> Effect:
        """As the predicted effect of a plan."""
        return Effect(
            throughput=self.throughput,
            low=self.low,
            high=self.high,
            confidence=self.confidence,
            before=before,
            cost=cost,
        )


class Shape(Protocol):
    """A size that a job can have."""

    def axes(self) -> tuple[float, ...]:
        """What can be changed about it, as positive numbers."""
        ...


ShapeT = TypeVar("ShapeT", bound=Shape)


@dataclass(frozen=True)
class TrustRegion:
    """How far from what was measured a plan may go: each axis by a factor.

    A prediction that was right widens the region, one that was wrong narrows it.
    """

    factor: float = 2.0
    """A plan may multiply or divide each axis of a measured shape by this."""
    least: float = 1.25
    most: float = 4.0

    def __post_init__(self) -> None:
        if not 1.0 < self.least <= self.factor <= self.most:
            raise ConfigurationError(
                f"factor is {self.factor}: it must lie between least ({self.least}), "
                f"which is above 1, and most ({self.most})"
            )

    def contains(self, shape: Shape, measured: Iterable[Shape]) -> bool:
        """Whether some measured shape is near enough on every axis.

        One more unit of an axis is always near: from one worker, two can be tried.
        """
        return any(self.near(shape.axes(), other.axes()) for other in measured)

    def after(self, *, within: bool) -> TrustRegion:
        """The region after a plan was measured, ``within`` its predicted interval or not."""
        factor = self.factor**2 if within else math.sqrt(self.factor)
        return replace(self, factor=min(self.most, max(self.least, factor)))

    def near(self, axes: Sequence[float], others: Sequence[float]) -> bool:
        """Whether the values of some axes are near others."""
        limit = self.factor * (1 + 1e-9)
        return all(
            abs(a - b) <= 1 or max(a, b) <= limit * min(a, b)
            for a, b in zip(axes, others, strict=True)
        )


def next_sample(
    predict: Callable[[ShapeT], Prediction],
    shapes: Sequence[ShapeT],
    *,
    cost: Callable[[ShapeT], float] | None = None,
) -> ShapeT:
    """The shape to measure next: where the model knows least, per unit of cost.

    For a linear model this is the greedy D-optimal design: the column that no sample has told from
    the others yet is where the prediction is most uncertain.

    Args:
        predict: The fitted model.
        shapes: What may be tried, in the trust region.
        cost: Of trying a shape; all cost the same by default.

    Raises:
        ConfigurationError: There is nothing to choose from.
    """
    if not shapes:
        raise ConfigurationError("shapes is empty: it must have at least one shape to measure")
    price = cost or (lambda _: 1.0)
    return max(shapes, key=lambda shape: predict(shape).spread / price(shape))


def interval(
    throughput: float, *, spread: float, deviation: float, quantile: float, confidence: float
) -> Prediction:
    """A prediction whose logarithm is spread symmetrically.

    Args:
        throughput: Samples per second.
        spread: Relative standard deviation of the mean.
        deviation: The same of one measurement: the mean's and the noise's together.
        quantile: By how many deviations the interval reaches to each side.
        confidence: How often a measurement should lie in it.
    """
    reach = math.exp(min(quantile * deviation, 50.0))
    return Prediction(throughput, throughput / reach, throughput * reach, confidence, spread)
