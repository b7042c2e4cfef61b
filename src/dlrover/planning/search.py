"""The sizes of a job, and the choice of the one that pays. Needs numpy (extra ``planning``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrover.errors import ConfigurationError

EXACT = 200_000
"""Maximum number of sizes that are rated: more take longer than 50 ms."""


@dataclass(frozen=True)
class Prices:
    """Prices per hour, in any unit."""

    cpu: float = 1.0
    """Price of a core."""
    memory: float = 0.1
    """Price of a GiB."""
    accelerator: float = 50.0


@dataclass(frozen=True)
class Preferences:
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


def pareto(throughput: Any, cost: Any) -> Any:
    """Return the indices of the sizes that no other one beats in both, from the cheapest to the dearest."""
    order = np.lexsort((-np.asarray(throughput), np.asarray(cost)))
    best = np.maximum.accumulate(np.asarray(throughput)[order])
    first = np.concatenate([[True], best[1:] > best[:-1]])
    return order[first]


def candidates(axes: Sequence[Sequence[float]]) -> Any:
    """Return the sizes of a space, one row each; the longest axes of a large space are thinned, in equal ratios.

    Args:
        axes: The values that each axis can have: positive numbers, in ascending order.
    """
    kept = [np.asarray(axis, dtype=float) for axis in axes]
    while math.prod(len(axis) for axis in kept) > EXACT:
        longest = max(range(len(kept)), key=lambda axis: len(kept[axis]))
        values = kept[longest]
        ratios = np.geomspace(values[0], values[-1], len(values) * 9 // 10)
        kept[longest] = values[np.unique(np.searchsorted(values, ratios * (1 - 1e-9)))]
    grids = np.meshgrid(*kept, indexing="ij")
    return np.stack([grid.ravel() for grid in grids], axis=-1)


def best(throughput: Any, cost: Any, choice: Preferences) -> int:
    """Return the index of the size that pays most; of several, the cheapest."""
    return int(np.lexsort((cost, -worth(throughput, cost, choice)))[0])


def worth(throughput: Any, cost: Any, choice: Preferences) -> Any:
    """Return the figure that a search maximizes, for numbers or arrays."""
    return throughput / np.maximum(cost, 1e-9) ** choice.weight
