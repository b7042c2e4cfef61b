"""Conversion of the sizes that jobs report to the samples that models are fitted to."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dlrover.planning.allreduce import RingSample, RingShape
from dlrover.spec import brain

EACH = 3
"""Samples of one size that a model is fitted to: only the latest, because throughputs drift."""


def ring_shape(shape: brain.Shape) -> RingShape:
    """Return the size of an all-reduce job."""
    nodes = shape.groups["worker"].count
    return RingShape(nodes, nodes * shape.per_node, shape.batch, shape.passes)


def ring_sample(sample: brain.Sample) -> RingSample:
    """Return a step of one pass, which is what the model is fitted to."""
    shape = ring_shape(sample.shape)
    step = shape.replicas * shape.batch * shape.passes / sample.throughput
    compute = sample.compute_seconds
    if shape.passes == 1:
        return RingSample(shape, step, compute)
    if compute is not None and step > (shape.passes - 1) * compute:
        return RingSample(shape, step - (shape.passes - 1) * compute, compute)
    # No pass was measured: treat all samples as one pass, which computes about as long.
    return RingSample(RingShape(shape.nodes, shape.replicas, shape.batch * shape.passes), step)


def latest_of_each(samples: Sequence[brain.Sample]) -> list[brain.Sample]:
    """Return the latest samples of each size; ``samples`` has the oldest first."""
    by_shape: dict[bytes, list[brain.Sample]] = {}
    for sample in samples:
        by_shape.setdefault(msgspec.msgpack.encode(sample.shape), []).append(sample)
    return [sample for of_shape in by_shape.values() for sample in of_shape[-EACH:]]
