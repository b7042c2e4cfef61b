"""Conversion of the sizes that masters report to the terms of the models in `dlrover.planning`."""

from __future__ import annotations

import math

import msgspec

from dlrover.brain.known import Job
from dlrover.planning.allreduce import RingModel, fit_ring
from dlrover.planning.measured import latest_of_each, ring_sample, ring_shape
from dlrover.planning.parameter_server import ServerModel, ServerSample, ServerShape, fit_servers
from dlrover.planning.plans import Terms
from dlrover.planning.throughput import Prediction
from dlrover.spec import brain
from dlrover.spec.batches import Batches
from dlrover.spec.plan import Group

KEPT = 20_000
"""Maximum number of models kept; a model serves until its job has a new sample."""


def server_shape(shape: brain.Shape) -> ServerShape:
    """Return the size of a parameter-server job; unknown cores count as one."""
    worker, server = shape.groups["worker"], shape.groups.get("ps", Group(count=1))
    return ServerShape(
        worker.count, server.count, worker.cpu or 1.0, server.cpu or 1.0, shape.batch * shape.passes
    )


class Models:
    """Fitted models of jobs, each kept until its job has a new sample."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, RingModel | ServerModel]] = {}

    def of(self, job: Job) -> RingModel | ServerModel | None:
        """Return the model of a job; None if it has no samples."""
        version, model = self._kept.get(job.id, (0, None))
        if model is not None and version == job.version:
            return model
        samples = latest_of_each(job.samples)
        if not samples:
            return None
        if job.description.strategy == "ps":
            model = fit_servers(
                [ServerSample(server_shape(s.shape), s.throughput) for s in samples]
            )
        else:
            model = fit_ring([ring_sample(sample) for sample in samples])
        if len(self._kept) >= KEPT:
            self._kept.clear()
        self._kept[job.id] = (job.version, model)
        return model


def predict(model: RingModel | ServerModel, shape: brain.Shape) -> Prediction:
    """Return the predicted throughput of a shape."""
    if isinstance(model, RingModel):
        return model.predict(ring_shape(shape))
    return model.predict(server_shape(shape))


def terms_of(job: Job) -> Terms:
    """Return the limits of a plan: wider after correct predictions, narrower after wrong ones."""
    terms = Terms()
    region = terms.region
    for outcome in job.outcomes:
        region = region.after(within=outcome.within)
    return Terms(terms.prices, terms.choice, region)


def allowed(bounds: brain.Range) -> list[int]:
    """Return the numbers that a range contains."""
    first = -(-bounds.least // bounds.unit) * bounds.unit
    return list(range(first, bounds.most + 1, bounds.unit))


def counts_near(job: Job, kind: str) -> list[int]:
    """Return the node counts of a kind that a job may have next: those near the measured ones."""
    space = job.description.space
    bounds = space.servers if kind == "ps" else space.workers
    shapes = [sample.shape for sample in job.samples]
    shapes += [job.current] if job.current is not None else []
    known = [shape.groups[kind].count for shape in shapes if kind in shape.groups]
    if not known:
        return allowed(bounds)
    factor = terms_of(job).region.factor
    least = max(bounds.least, min(min(known) - 1, math.ceil(min(known) / factor)))
    most = min(bounds.most, max(max(known) + 1, math.floor(max(known) * factor)))
    return allowed(msgspec.structs.replace(bounds, least=least, most=most))


def batches_of(job: Job) -> Batches | None:
    """Return the global batches that a job allows; None: each worker's batch stays."""
    return job.samples[-1].batches if job.samples else None


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


def use_of(groups: dict[str, Group]) -> dict[str, float]:
    """Return the resources that nodes take together, as far as they are known."""
    use = {
        "accelerator": float(sum(g.count * g.accelerators for g in groups.values())),
        "cpu": sum(g.count * g.cpu for g in groups.values()),
        "memory": float(sum(g.count * g.memory for g in groups.values())),
    }
    return {name: amount for name, amount in use.items() if amount > 0}
