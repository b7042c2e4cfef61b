"""Conversion of the sizes that jobs report to the terms of the models, and the models fitted to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from dlrover.planning.allreduce import RingModel, RingSample, RingShape, fit_ring
from dlrover.planning.parameter_server import ServerModel, ServerSample, ServerShape, fit_servers
from dlrover.planning.throughput import SpeedPrediction
from dlrover.spec import brain
from dlrover.spec.node import SERVER, WORKER, Size
from dlrover.spec.plan import NodeGroup

Model: TypeAlias = RingModel | ServerModel
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


def fitted(samples: Sequence[brain.Sample], strategy: brain.Strategy) -> Model:
    """Return the model of a job, fitted to the latest samples of each size."""
    latest = latest_of_each(samples)
    if strategy == "ps":
        return fit_servers([ServerSample(server_shape(s.shape), s.throughput) for s in latest])
    return fit_ring([ring_sample(sample) for sample in latest])


def server_shape(shape: brain.Shape) -> ServerShape:
    """Return the size of a parameter-server job; unknown cores count as one."""
    worker, server = shape.groups["worker"], shape.groups.get("ps", NodeGroup(count=1))
    return ServerShape(
        worker.count, server.count, worker.cpu or 1.0, server.cpu or 1.0, shape.batch * shape.passes
    )


def predict(model: Model, shape: brain.Shape) -> SpeedPrediction:
    """Return the predicted throughput of a shape."""
    if isinstance(model, RingModel):
        return model.predict(ring_shape(shape))
    return model.predict(server_shape(shape))


def size_of(shape: brain.Shape) -> Size:
    """Return the numbers of a shape's nodes."""
    server = shape.groups.get(SERVER)
    return Size(shape.groups[WORKER].count, server.count if server is not None else 0)


def allowed(bounds: brain.Range) -> list[int]:
    """Return the numbers that a range contains."""
    first = -(-bounds.least // bounds.unit) * bounds.unit
    return list(range(first, bounds.most + 1, bounds.unit))


def total_batch(shape: brain.Shape) -> int:
    """Return the samples of one step of all workers."""
    return ring_shape(shape).replicas * shape.batch * shape.passes


def with_batch(shape: brain.Shape, total: int, pass_most: int) -> brain.Shape:
    """Return a shape with another global batch; each worker makes as few passes as its memory allows."""
    share = -(-total // ring_shape(shape).replicas)
    passes = -(-share // pass_most)
    return msgspec.structs.replace(shape, batch=-(-share // passes), passes=passes)


def resized(shape: brain.Shape, workers: int, servers: int | None = None) -> brain.Shape:
    """Return a shape with other numbers of the same nodes; each worker's batch stays."""
    groups = dict(shape.groups)
    groups["worker"] = msgspec.structs.replace(groups["worker"], count=workers)
    if servers is not None and "ps" in groups:
        groups["ps"] = msgspec.structs.replace(groups["ps"], count=servers)
    return msgspec.structs.replace(shape, groups=groups)


def use_of(groups: dict[str, NodeGroup]) -> dict[str, float]:
    """Return the resources that nodes take together, as far as they are known."""
    use = {
        "accelerator": float(sum(g.count * g.accelerators for g in groups.values())),
        "cpu": sum(g.count * g.cpu for g in groups.values()),
        "memory": float(sum(g.count * g.memory for g in groups.values())),
    }
    return {name: amount for name, amount in use.items() if amount > 0}


def added(uses: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of several uses of resources."""
    total: dict[str, float] = {}
    for use in uses:
        for name, amount in use.items():
            total[name] = total.get(name, 0.0) + amount
    return total
