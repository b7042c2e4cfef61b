"""The sizes of a job that nothing beats in both throughput and cost, and the one among them that pays.

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
"""Sizes that are searched in full: more of them take longer than 50 ms."""


Rate = Callable[[Any], tuple[Any, Any]]
"""From an array with a row per size and a column per axis, the throughputs and the costs."""


@dataclass(frozen=True)
class Prices:
    """Of an hour, in any unit."""

    cpu: float = 1.0
    """A core."""
    memory: float = 0.1
    """A GiB."""
    accelerator: float = 50.0


@dataclass(frozen=True)
class Choice:
    """What a search looks for."""

    weight: float = 0.5
    """How much the cost counts: the plan with the largest ``throughput / cost ** weight`` is taken.

    At 0 it is the fastest one, at 1 the one with the cheapest sample.
    """
    gain: float = 0.05
    """A plan must be better than the present one by this share of that figure: a change has a price too."""

    caution: float = 0.5
    """By how many of its standard deviations a prediction counts less than it says."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ConfigurationError(f"weight is {self.weight}: it must lie between 0 and 1")


@dataclass(frozen=True)
class Found:
    """A size on the Pareto front."""

    values: tuple[float, ...]
    """One per axis."""
    throughput: float
    cost: float


def pareto(throughput: Any, cost: Any) -> Any:
    """The indices of the sizes that no other one beats in both, from the cheapest to the dearest."""
    order = np.lexsort((-np.asarray(throughput), np.asarray(cost)))
    best = np.maximum.accumulate(np.asarray(throughput)[order])
    first = np.concatenate([[True], best[1:] > best[:-1]])
    return order[first]


def candidates(axes: Sequence[Sequence[float]], rate: Rate, *, seed: int = 0) -> Any:
    """The sizes of a space, one row each; of a large one those near the Pareto front.

    Args:
        axes: The values that each axis can have.
        rate: The model. A size that is not allowed has the throughput 0.
        seed: Of NSGA-II.

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
    """The Pareto front of a space; the arguments are those of `candidates`."""
    rows = candidates(axes, rate, seed=seed)
    throughput, cost = rate(rows)
    front = [index for index in pareto(throughput, cost) if throughput[index] > 0]
    return [
        Found(tuple(float(v) for v in rows[i]), float(throughput[i]), float(cost[i])) for i in front
    ]


def best(front: Sequence[Found], choice: Choice) -> Found:
    """The size of a front that pays most.

    Raises:
        ConfigurationError: No size is allowed.
    """
    if not front:
        raise ConfigurationError("the space has no size that is allowed: widen its bounds")
    return max(front, key=lambda found: worth(found.throughput, found.cost, choice))


def worth(throughput: float, cost: float, choice: Choice) -> float:
    """What a search makes as large as it can."""
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
