"""Value of a larger batch: throughput times statistical efficiency, as in Pollux (OSDI 2021).

Needs numpy (extra ``planning``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrover.planning.allreduce import RingModel
from dlrover.spec.measurements import Batches

CANDIDATES = 40
"""Number of batch sizes tried between the smallest and the largest one, in equal ratios."""
SLACK = 1e-8


@dataclass(frozen=True)
class GradientNoise:
    """Noise of a batch's gradients, measured while training."""

    square: float
    """Squared norm of the mean gradient."""
    variance: float
    """Variance of the gradient of a batch of ``reference`` samples."""
    reference: int
    """Samples of the reference batch."""

    @classmethod
    def of(cls, batches: Batches | None) -> GradientNoise | None:
        """Return a job's measurements, with its smallest batch as reference; None if there are none."""
        if batches is None or not (batches.square > 0 and batches.variance > 0):
            return None
        return cls(batches.square, batches.variance / batches.least, batches.least)

    def efficiency(self, batch: Any) -> Any:
        """Return the progress per sample with a batch, relative to the reference batch, where it is 1.

        ``batch`` is a number or an array.
        """
        scale = np.asarray(batch) / self.reference
        gain = (self.variance + self.square) / (self.variance / scale + self.square)
        return gain / scale


@dataclass(frozen=True)
class BatchLimits:
    """Batches that the user allows. ``least`` equal to ``most`` keeps the batch as it is."""

    least: int
    """Minimum samples of one step of all replicas."""
    most: int
    replica_least: int = 1
    """Minimum samples of one replica in one pass."""
    replica_most: int = 1 << 30


@dataclass(frozen=True)
class BestBatches:
    """The batch with the most progress for each size of a job, as arrays of the same length."""

    goodput: Any
    """Useful samples per second: throughput times efficiency; 0 if no batch is allowed."""
    batch: Any
    """Samples of one replica in one pass."""
    passes: Any


def best_batches(
    model: RingModel, noise: GradientNoise | None, limits: BatchLimits, nodes: Any, replicas: Any
) -> BestBatches:
    """Return the best batch for each pair of ``nodes`` and ``replicas``, which are arrays.

    Without ``noise`` every sample counts the same. With it, a single replica makes at least two passes if its
    batch is larger than the smallest: the noise cannot be measured in one pass.
    """
    nodes, replicas = np.atleast_1d(nodes), np.atleast_1d(replicas)
    total = _candidates(limits, replicas)
    each = total / replicas
    passes = np.ceil(each / limits.replica_most - SLACK)
    alone = (replicas == 1) & (total > limits.least + SLACK) & (noise is not None)
    passes = np.where(alone, np.maximum(passes, 2), passes)
    batch = np.ceil(each / passes - SLACK)
    total = batch * passes * replicas
    allowed = (batch >= limits.replica_least) & (total <= np.maximum(limits.most, replicas + each))
    goodput = model.throughput_of(nodes, replicas, batch, passes)
    if noise is not None:
        goodput = goodput * noise.efficiency(total)
    goodput = np.where(allowed, goodput, 0.0)
    best = np.argmax(goodput, axis=0), np.arange(len(replicas))
    return BestBatches(goodput[best], batch[best].astype(int), passes[best].astype(int))


def _candidates(limits: BatchLimits, replicas: Any) -> Any:
    """Return the candidate batches of all replicas, one column per size."""
    if limits.least == limits.most:
        return np.full((1, len(replicas)), float(limits.least))
    smallest = np.maximum(limits.least, limits.replica_least * replicas)
    largest = np.maximum(limits.most, smallest)
    return np.geomspace(smallest, largest, CANDIDATES)
