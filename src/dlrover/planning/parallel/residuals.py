"""What the time model misses of whole kinds of runs. Needs numpy.

Some clusters are slow at one size, or for one way to communicate, by much more than a sum of terms can say: a fit that
took such runs in would be wrong for all others. The runs of a kind that were measured say it for the others of this
kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrover.planning.parallel.columns import Columns
from dlrover.planning.parallel.records import Cluster, Residual


def kinds(of: Columns, cluster: Cluster) -> Any:
    """Return the kind of each strategy's runs, one row each: what a residual has besides its factor."""
    return np.stack([of.size, of.tp * of.cp > cluster.per_node, of.pp > 1], axis=1)


def medians(of_runs: Any, ratios: Any) -> tuple[Residual, ...]:
    """Return the residual of each kind, from runs' kinds and their measured times as multiples of the predicted ones.

    It is the median, so that no single fault of a run decides, drawn towards 1 where a kind has few runs.
    """
    found = []
    every, index = np.unique(of_runs, axis=0, return_inverse=True)
    for at, (ranks, between, pipeline) in enumerate(every):
        here = ratios[index.reshape(-1) == at]
        factor = np.median(here) ** (len(here) / (len(here) + 1))
        found.append(Residual(int(ranks), bool(between), bool(pipeline), float(factor)))
    return tuple(found)


def factors(of: Columns, cluster: Cluster) -> Any:
    """Return the factor of each strategy's time: 1 where no run of its kind was measured."""
    found = np.ones(len(of))
    of_strategies = kinds(of, cluster)
    for *kind, factor in cluster.residuals:
        found[np.all(of_strategies == kind, axis=1)] = factor
    return found
