"""The sizes of a job that none beats in both throughput and cost, and the choice of the one that pays.

Spaces of up to `EXACT` sizes are searched in full; larger ones by NSGA-II from ``pymoo`` (extra
``planning-search``). Needs numpy (extra ``planning``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrover.errors import ConfigurationError

EXACT = 200_000
"""Maximum number of sizes searched in full: more take longer than 50 ms."""


Rate = Callable[[Any], tuple[Any, Any]]
"""Function from an array with a row per size and a column per axis to the throughputs and the costs."""


@dataclass(frozen=True)
class Prices:
    """Prices per hour, in any unit."""

    cpu: float = 1.0
    """Price of a core."""
    memory: float = 0.1
    """Price of a GiB."""
    accelerator: float = 50.0


@dataclass(frozen=True)
class Choice:
    """Preferences of a search."""

    weight: float = 0.5
    """Weight of the cost: the plan with the largest ``throughput / cost ** weight`` is taken.

    At 0 that is the fastest one, at 1 the one with the cheapest sample.
    """
    gain: float = 0.05
    """Minimum relative improvement of that figure over the present plan: a change has a price, too."""

    caution: float = 0.5
    """Standard deviations by which a prediction is lowered."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ConfigurationError(f"weight is {self.weight}: it must lie between 0 and 1")


@dataclass(frozen=True)
class Found:
    """A size on the Pareto front."""

    values: tuple[float, ...]
    """Values, one per axis."""
    throughput: float
    cost: float


def pareto(throughput: Any, cost: Any) -> Any:
    """Return the indices of the sizes that no other one beats in both, from the cheapest to the dearest."""
    order = np.lexsort((-np.asarray(throughput), np.asarray(cost)))
    best = np.maximum.accumulate(np.asarray(throughput)[order])
    first = np.concatenate([[True], best[1:] > best[:-1]])
    return order[first]


def candidates(axes: Sequence[Sequence[float]], rate: Rate, *, seed: int = 0) -> Any:
    """Return the sizes of a space, one row each; of a large space, those near the Pareto front.

    Args:
        axes: The values that each axis can have.
        rate: The model. A size that is not allowed has the throughput 0.
        seed: Seed of NSGA-II.

    Raises:
        ConfigurationError: An axis is empty, or a large space is given without ``pymoo``.
    """
    if not axes or any(not len(axis) for axis in axes):
        raise ConfigurationError("axes has an empty axis: each needs at least one value")
    if math.prod(len(axis) for axis in axes) > EXACT:
        return _evolved(axes, rate, seed)
    grids = np.meshgrid(*[np.asarray(axis, dtype=float) for axis in axes], indexing="ij")
    return np.stack([grid.ravel() for grid in grids], axis=-1)


def search(axes: Sequence[Sequence[float]], rate: Rate, *, seed: int = 0) -> list[Found]:
    """Return the Pareto front of a space; the arguments are those of `candidates`."""
    rows = candidates(axes, rate, seed=seed)
    throughput, cost = rate(rows)
    front = [index for index in pareto(throughput, cost) if throughput[index] > 0]
    return [
        Found(tuple(float(v) for v in rows[i]), float(throughput[i]), float(cost[i])) for i in front
    ]


def best(front: Sequence[Found], choice: Choice) -> Found:
    """Return the size of a front that pays most.

    Raises:
        ConfigurationError: No size is allowed.
    """
    if not front:
        raise ConfigurationError("the space has no size that is allowed: widen its bounds")
    return max(front, key=lambda found: worth(found.throughput, found.cost, choice))


def worth(throughput: float, cost: float, choice: Choice) -> float:
    """Return the figure that a search maximizes."""
    return float(throughput / max(cost, 1e-9) ** choice.weight)


def _evolved(axes: Sequence[Sequence[float]], rate: Rate, seed: int) -> Any:
    try:
        from dlrover.planning.nsga import evolve  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigurationError(
            f"the space has more than {EXACT:,} sizes, which needs pymoo: "
            "pip install 'dlrover[planning-search]'"
        ) from error
    return evolve(axes, rate, seed)
