"""The built-in optimizer of the cluster: gives resources to the jobs that gain most from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from dlrover.brain.machine.job import JobFacts, Models, Past
from dlrover.errors import DLRoverError
from dlrover.planning.allreduce import RingModel
from dlrover.planning.cluster import Demand, Option, Share, allocate
from dlrover.planning.efficiency import BatchLimits, GradientNoise, best_batches
from dlrover.planning.parameter_server import ServerModel
from dlrover.planning.search import pareto
from dlrover.planning.shapes import (
    Model,
    added,
    predict,
    resized,
    ring_shape,
    server_shape,
    total_batch,
    use_of,
    with_batch,
)
from dlrover.planning.warmstart import (
    FIRST_SECONDS,
    LEAST_SIMILARITY,
    expected_remaining,
    first_plan,
    similarity,
)
from dlrover.spec import brain
from dlrover.spec.measurements import Batches
from dlrover.spec.node import SERVER, WORKER
from dlrover.spec.plan import ResourcePlan

SIZES = 24
"""Maximum number of a job's sizes that are compared."""
AXIS = 32
"""Maximum number of worker counts, and of server counts, to choose those sizes from."""


T = TypeVar("T")


@dataclass(frozen=True)
class _Case:
    """A job and the sizes it may have, by name."""

    job: JobFacts
    demand: Demand
    shapes: Mapping[str, brain.Shape]
    kept: Mapping[str, float]
    """Resources that it keeps in any case, so no running job loses all nodes; its sizes count from there."""


class ClusterOptimizer:
    """Optimizer that divides the cluster among its jobs by marginal gain, within their queues' quotas."""

    whole = True

    def __init__(self) -> None:
        self._models = Models()

    def advise(
        self, jobs: Sequence[JobFacts], past: Past, cluster: brain.ClusterResources
    ) -> dict[str, brain.Advice]:
        """Return what each job should have. A job whose reports fit no model stays as it is, and only that one."""
        if not cluster.nodes:
            reason = "the resources of the cluster are unknown: no report has named them"
            return {job.id: brain.Advice(reason=reason) for job in jobs}
        found = {job.id: self._case_or_why(job, past, cluster) for job in jobs}
        cases = {name: case for name, case in found.items() if isinstance(case, _Case)}
        kept = added(case.kept for case in cases.values())
        shares = allocate(
            [case.demand for case in cases.values()],
            _less(_capacity([case.job for case in cases.values()], cluster), kept),
            quotas=_less(_quotas(cluster), kept),
        )
        return {
            name: self._advice(case, shares[name]) if isinstance(case, _Case) else case
            for name, case in found.items()
        }

    def _case_or_why(
        self, job: JobFacts, past: Past, cluster: brain.ClusterResources
    ) -> _Case | brain.Advice:
        try:
            return self._case(job, past, cluster)
        except (ArithmeticError, ValueError, RuntimeError, DLRoverError) as error:
            return brain.Advice(reason=f"its samples fit no model: {error}")

    def _case(self, job: JobFacts, past: Past, cluster: brain.ClusterResources) -> _Case:
        model, past = self._models.of(job), past.of(job.id)
        shapes = _shapes(job, model, past)
        sizes = [
            Option(name, _use(job, shape, cluster), _speed(job, model, shape))
            for name, shape in shapes.items()
        ]
        sizes.sort(key=lambda size: size.speed)
        current = None if job.current is None else _name(job.current, job.batches)
        kept = _smallest(sizes) if current else {}
        sizes = [Option(size.name, _less(size.use, kept), size.speed) for size in sizes]
        demand = Demand(
            job.id,
            sizes,
            _remaining(job, past, sizes),
            current=current,
            priority=job.description.priority,
            restart=job.description.restart,
        )
        return _Case(job, demand, shapes, kept)

    def _advice(self, case: _Case, share: Share) -> brain.Advice:
        job = case.job
        if share.size is None or share.size.name == case.demand.current:
            return brain.Advice(reason=share.reason)
        shape, model = case.shapes[share.size.name], self._models.of(job)
        effect = None
        if model is not None and job.current is not None:
            before = predict(model, job.current).throughput
            effect = predict(model, shape).effect(before=before)
        batch = _other_batch(job, shape)
        plan = ResourcePlan(groups=shape.groups, reason=share.reason, effect=effect, batch=batch)
        return brain.Advice(plan=plan, reason=share.reason)


def _other_batch(job: JobFacts, shape: brain.Shape) -> int | None:
    """Return the global batch of a shape; None if it stays, apart from rounding of each worker's share."""
    batches, current = job.batches, job.current
    if current is None or batches is None or batches.least == batches.most:
        return None
    same = with_batch(shape, total_batch(current), batches.pass_most)
    if shape.batch * shape.passes == same.batch * same.passes:
        return None
    return min(max(total_batch(shape), batches.least), batches.most)


def _shapes(job: JobFacts, model: Model | None, past: Past) -> dict[str, brain.Shape]:
    """Return the sizes that a job may have next, by name: those near the measured ones."""
    if job.current is None:
        first = brain.Shape(groups=first_plan(job.description, past.jobs).groups)
        return {_name(first, None): first}
    batches = job.batches
    if model is None:
        return {_name(job.current, batches): job.current}
    match model:
        case RingModel():
            shapes = _ring(job, job.current, model)
        case _:
            shapes = _servers(job, job.current, model)
    return {_name(shape, batches): shape for shape in [*shapes, job.current]}


def _ring(job: JobFacts, current: brain.Shape, model: RingModel) -> list[brain.Shape]:
    region, measured = job.terms.region, [sample.shape for sample in model.samples]
    shapes = [resized(current, count) for count in _spread(job.counts(WORKER))]
    batches = job.batches
    if batches is not None:
        total = total_batch(current)
        same = [with_batch(shape, total, batches.pass_most) for shape in shapes]
        shapes = [*same, *_with_best_batches(shapes, total, batches, model, region.factor)]
    return [shape for shape in shapes if region.contains(ring_shape(shape), measured)]


def _with_best_batches(
    shapes: list[brain.Shape], total: int, batches: Batches, model: RingModel, factor: float
) -> list[brain.Shape]:
    """Return each shape with its best global batch near the present ``total``; none without noise."""
    noise = GradientNoise.of(batches)
    if noise is None or batches.least == batches.most:
        return []
    limits = BatchLimits(
        max(batches.least, math.ceil(total / factor)),
        min(batches.most, math.floor(total * factor)),
        replica_most=batches.pass_most,
    )
    sizes = [ring_shape(shape) for shape in shapes]
    nodes, replicas = ([getattr(s, name) for s in sizes] for name in ("nodes", "replicas"))
    best = best_batches(model, noise, limits, nodes, replicas)
    return [
        msgspec.structs.replace(shape, batch=int(batch), passes=int(passes))
        for shape, batch, passes, goodput in zip(
            shapes, best.batch, best.passes, best.goodput, strict=True
        )
        if goodput > 0
    ]


def _servers(job: JobFacts, current: brain.Shape, model: ServerModel) -> list[brain.Shape]:
    """Return those of the many near sizes that no other one beats."""
    region = job.terms.region
    measured = {sample.shape for sample in model.samples}
    shapes = [
        shape
        for workers in _spread(job.counts(WORKER), AXIS)
        for servers in _spread(job.counts(SERVER), AXIS)
        if region.contains(server_shape(shape := resized(current, workers, servers)), measured)
    ]
    if not shapes:
        return []
    sizes = [server_shape(shape) for shape in shapes]
    w, p, cw, cp = np.array([size.axes() for size in sizes]).T
    throughput = model.throughput_of(w, p, cw, cp, sizes[0].batch)
    cost = w * cw + p * cp
    return _spread([shapes[index] for index in pareto(throughput, cost)])


def _spread(values: list[T], most: int = SIZES) -> list[T]:
    """Return at most ``most`` of the values, evenly spaced from the first to the last."""
    if len(values) <= most:
        return values
    step = (len(values) - 1) / (most - 1)
    return [values[round(number * step)] for number in range(most)]


def _name(shape: brain.Shape, batches: Batches | None) -> str:
    worker, server = shape.groups[WORKER], shape.groups.get(SERVER)
    unit = "node" if worker.count == 1 else "nodes"
    name = f"{worker.count} {unit}" + (f" and {server.count} ps" if server else "")
    if batches is not None and batches.least < batches.most:
        name += f" with batches of {total_batch(shape)} samples"
    return name


def _remaining(job: JobFacts, past: Past, sizes: Sequence[Option]) -> float:
    """Return the estimated number of samples until the job's end."""
    described = job.description
    if described.total > 0:
        return max(described.total - job.done, 1.0)
    similar = [
        total
        for one, total in zip(past.jobs, past.done, strict=True)
        if total > 0 and similarity(described.features, one.features) >= LEAST_SIMILARITY
    ]
    slowest = min((size.speed for size in sizes if size.speed > 0), default=1.0)
    return expected_remaining(job.done, similar, FIRST_SECONDS * slowest)


def _speed(job: JobFacts, model: Model | None, shape: brain.Shape) -> float:
    """Return useful samples per second, lowered by their uncertainty; 1 if nothing was measured yet."""
    if model is None:
        return 1.0
    expected, noise = predict(model, shape), GradientNoise.of(job.batches)
    efficiency = float(noise.efficiency(total_batch(shape))) if noise is not None else 1.0
    caution = math.exp(-job.terms.choice.caution * expected.spread)
    return expected.throughput * efficiency * caution


def _use(job: JobFacts, shape: brain.Shape, cluster: brain.ClusterResources) -> dict[str, float]:
    """Return what a size takes of the divided resources and of the quota of the job's queue."""
    taken, queue = use_of(shape.groups), job.description.queue
    use = {name: amount for name, amount in taken.items() if name in cluster.capacity}
    for name in cluster.quotas.get(queue, {}):
        use[_in_queue(queue, name)] = taken.get(name, 0.0)
    return use


def _smallest(sizes: Sequence[Option]) -> dict[str, float]:
    """Return the least amount of each resource that any size takes."""
    names = {name for size in sizes for name in size.use}
    return {name: min(size.use.get(name, 0.0) for size in sizes) for name in names}


def _capacity(jobs: Sequence[JobFacts], cluster: brain.ClusterResources) -> dict[str, float]:
    """Return what these jobs may have together: all that is not taken by others."""
    ready = [node for node in cluster.nodes if node.ready]
    used, by_jobs = added(node.used for node in ready), added(node.by_jobs for node in ready)
    own = added(use_of(job.current.groups) for job in jobs if job.current is not None)
    ours = {name: min(amount, by_jobs.get(name, 0.0)) for name, amount in own.items()}
    return _less(cluster.capacity, _less(used, ours))


def _less(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(0.0, amount - other.get(name, 0.0)) for name, amount in one.items()}


def _quotas(cluster: brain.ClusterResources) -> dict[str, float]:
    """Return the limits of each queue, as separate resources."""
    return {
        _in_queue(queue, resource): amount
        for queue, limits in cluster.quotas.items()
        for resource, amount in limits.items()
    }


def _in_queue(queue: str, resource: str) -> str:
    return f"{queue}/{resource}"
