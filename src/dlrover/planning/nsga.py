"""NSGA-II over the sizes of a job, for spaces too large for a full search.

Needs pymoo (extra ``planning-search``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from pymoo.algorithms.moo.nsga2 import NSGA2
from pymoo.core.problem import Problem
from pymoo.operators.crossover.sbx import SBX
from pymoo.operators.mutation.pm import PM
from pymoo.operators.repair.rounding import RoundingRepair
from pymoo.operators.sampling.rnd import IntegerRandomSampling
from pymoo.optimize import minimize

from dlrover.planning.search import Rate

POPULATION, GENERATIONS = 60, 60


class _Sizes(Problem):
    """Two objectives over indices of each axis' values; a size without throughput is not allowed."""

    def __init__(self, axes: Sequence[Any], rate: Rate) -> None:
        last = np.array([len(axis) - 1 for axis in axes])
        super().__init__(
            n_var=len(axes), n_obj=2, n_ieq_constr=1, xl=np.zeros(len(axes)), xu=last, vtype=int
        )
        self._axes, self._rate = axes, rate

    def _evaluate(self, x: Any, out: dict[str, Any], *_: Any, **__: Any) -> None:
        throughput, cost = self._rate(_rows(self._axes, x))
        out["F"] = np.stack([-throughput, cost], axis=-1)
        out["G"] = np.where(throughput > 0, -1.0, 1.0)[:, None]


def evolve(axes: Sequence[Sequence[float]], rate: Rate, seed: int) -> Any:
    """Return sizes near the Pareto front, one row each; the corners of the space are among them."""
    values = [np.asarray(axis, dtype=float) for axis in axes]
    whole = {"vtype": float, "repair": RoundingRepair()}
    algorithm = NSGA2(
        pop_size=POPULATION,
        sampling=IntegerRandomSampling(),
        crossover=SBX(prob=0.9, eta=3.0, **whole),
        mutation=PM(eta=3.0, **whole),
        eliminate_duplicates=True,
    )
    result = minimize(_Sizes(values, rate), algorithm, ("n_gen", GENERATIONS), seed=seed)
    corners = np.array(list(product(*[(0, len(axis) - 1) for axis in values])))
    found = [corners] if result.X is None else [corners, np.atleast_2d(result.X)]
    return _rows(values, np.concatenate(found))


def _rows(axes: Sequence[Any], indices: Any) -> Any:
    places = np.asarray(indices).astype(int).T
    return np.stack([axis[i] for axis, i in zip(axes, places, strict=True)], axis=-1)
