"""What a larger batch is worth: throughput times statistical efficiency, as Pollux has it (OSDI 2021).

Needs numpy (extra ``planning``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrover.planning.allreduce import RingModel
from dlrover.spec.batches import Batches

CANDIDATES = 40
"""Batch sizes that are tried between the smallest and the largest one, in equal ratios."""
SLACK = 1e-8


@dataclass(frozen=True)
class GradientNoise:
    """How much the gradients of a batch differ, measured while training."""

    square: float
    """Squared norm of the mean gradient."""
    variance: float
    """Variance of the gradient of a batch of ``reference`` samples."""
    reference: int
    """Samples."""

    @classmethod
    def of(cls, batches: Batches | None) -> GradientNoise | None:
        """What a job has measured, by its smallest batch; None: nothing."""
        if batches is None or not (batches.square > 0 and batches.variance > 0):
            return None
        return cls(batches.square, batches.variance / batches.least, batches.least)

    def efficiency(self, batch: Any) -> Any:
        """Progress per sample with a batch, relative to that with the reference batch; 1 at that one.

        ``batch`` is a number or an array.
        """
        scale = np.asarray(batch) / self.reference
        gain = (self.variance + self.square) / (self.variance / scale + self.square)
        return gain / scale


@dataclass(frozen=True)
class BatchLimits:
    """Which batches the user allows. The same number twice keeps the batch as it is."""

    least: int
    """Samples of one step of all replicas."""
    most: int
    replica_least: int = 1
    """Samples of one replica in one pass."""
    replica_most: int = 1 << 30


@dataclass(frozen=True)
class BestBatches:
    """For each size of a job, the batch with the most progress. Arrays that go together."""

    goodput: Any
    """Useful samples per second: throughput times efficiency; 0 where no batch is allowed."""
    batch: Any
    """Samples of one replica in one pass."""
    passes: Any


def best_batches(
    model: RingModel, noise: GradientNoise | None, limits: BatchLimits, nodes: Any, replicas: Any
) -> BestBatches:
    """Find the best batch for each pair of ``nodes`` and ``replicas``, which are arrays.

    Without ``noise`` every sample counts the same. With it, a single replica makes two passes at least when its
    batch is larger than the smallest: the noise cannot be measured in one.
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
    """Batches of all replicas: one column per size."""
    if limits.least == limits.most:
        return np.full((1, len(replicas)), float(limits.least))
    smallest = np.maximum(limits.least, limits.replica_least * replicas)
    largest = np.maximum(limits.most, smallest)
    return np.geomspace(smallest, largest, CANDIDATES)
