"""The built-in optimizer of single jobs: gives each job the free resources that pay for themselves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dlrover.brain.machine.job import JobFacts, Models, Past
from dlrover.planning.allreduce import RingModel
from dlrover.planning.measured import Measured, Proposal, means
from dlrover.planning.parameter_server import ServerModel
from dlrover.planning.plans import (
    RingSpace,
    ServerSpace,
    plan_ring,
    plan_servers,
    sample_ring,
    sample_servers,
)
from dlrover.planning.search import Prices
from dlrover.planning.shapes import (
    Model,
    latest_of_each,
    predict,
    resized,
    ring_shape,
    server_shape,
    size_of,
    total_batch,
    use_of,
)
from dlrover.planning.warmstart import first_plan
from dlrover.spec import brain
from dlrover.spec.node import SERVER, WORKER, Size
from dlrover.spec.plan import NodeGroup, ResourcePlan

STAYS = "no size near what was measured is worth a change"
NO_SAMPLES = "no throughput of the job has been reported yet"


class SingleJobOptimizer:
    """Optimizer that plans each job by its own samples, and its first plan by similar past jobs."""

    whole = False

    def __init__(self) -> None:
        self._models = Models()

    def advise(
        self, jobs: Sequence[JobFacts], past: Past, cluster: brain.ClusterResources
    ) -> dict[str, brain.Advice]:
        """Return what each job should have next; each job is planned separately."""
        return {job.id: self._advise(job, past, cluster) for job in jobs}

    def _advise(self, job: JobFacts, past: Past, cluster: brain.ClusterResources) -> brain.Advice:
        current = job.current
        if current is None:
            first = first_plan(job.description, past.jobs)
            return brain.Advice(plan=first, reason=first.reason)
        model = self._models.of(job)
        if model is None:
            return brain.Advice(reason=NO_SAMPLES)
        plan = _next_plan(job, current, model, cluster)
        if plan is None:
            return brain.Advice(reason=STAYS)
        return brain.Advice(plan=plan, reason=plan.reason)


def _next_plan(
    job: JobFacts, current: brain.Shape, model: Model, cluster: brain.ClusterResources
) -> ResourcePlan | None:
    """Return a better measured size, a better predicted one, or one to measure; None if there is none."""
    measured = _measured(job, current)
    known = measured.here in measured.known

    def free(size: Size) -> bool:
        return _fits(cluster, current.groups, job.resized(current, size).groups)

    better = measured.better(free) if known else None
    if better is not None:
        return _planned(better, job, current)
    match model:
        case RingModel():
            plan = _plan_ring(job, current, model, cluster, measured)
        case _:
            plan = _plan_servers(job, current, model, cluster, measured)
    if plan is not None or not known:
        return plan
    servers = job.counts(SERVER) if measured.here.servers else ()
    found = measured.neighbour(
        job.counts(WORKER),
        servers,
        lambda size: predict(model, job.resized(current, size)),
        fits=free,
    )
    return None if found is None else _planned(found, job, current)


def _planned(found: Proposal, job: JobFacts, current: brain.Shape) -> ResourcePlan:
    groups = job.resized(current, found.size).groups
    return ResourcePlan(groups=groups, reason=found.reason, effect=found.effect)


def _plan_ring(
    job: JobFacts,
    current: brain.Shape,
    model: RingModel,
    cluster: brain.ClusterResources,
    measured: Measured,
) -> ResourcePlan | None:
    worker = current.groups[WORKER]
    most = worker.count + _more(cluster, worker)
    nodes = [n for n in job.counts(WORKER) if n <= most and Size(n) not in measured.known]
    space = RingSpace(
        nodes=nodes,
        per_node=current.per_node,
        cpu=worker.cpu,
        total_batch=total_batch(current) if job.batches is not None else 0,
    )
    shape, terms = ring_shape(current), job.terms
    plan = plan_ring(model, space, shape, terms) or sample_ring(model, space, shape, terms)
    if plan is None:
        return None
    groups = {WORKER: msgspec.structs.replace(worker, count=plan.groups[WORKER].count)}
    return msgspec.structs.replace(plan, groups=groups)


def _plan_servers(
    job: JobFacts,
    current: brain.Shape,
    model: ServerModel,
    cluster: brain.ClusterResources,
    measured: Measured,
) -> ResourcePlan | None:
    worker, server = current.groups[WORKER], current.groups.get(SERVER, NodeGroup(count=1))
    bounds, shape, terms = job.description.space, server_shape(current), job.terms
    most_workers = worker.count + _more(cluster, worker)
    most_servers = server.count + _more(cluster, server)
    space = ServerSpace(
        workers=[count for count in job.counts(WORKER) if count <= most_workers],
        servers=[count for count in job.counts(SERVER) if count <= most_servers],
        worker_cpu=bounds.worker_cpu or (shape.worker_cpu,),
        server_cpu=bounds.server_cpu or (shape.server_cpu,),
        worker_memory=worker.memory,
        server_memory=server.memory * server.count,
        closed=frozenset(measured.known),
    )
    plan = plan_servers(model, space, shape, terms) or sample_servers(model, space, shape, terms)
    if plan is None or not _fits(cluster, current.groups, plan.groups):
        return None
    return plan


def _measured(job: JobFacts, current: brain.Shape) -> Measured:
    """Return what the latest samples that differ from ``current`` only in size have measured."""
    samples = [s for s in latest_of_each(job.samples) if _same_but_for_size(job, current, s.shape)]
    known = means((size_of(sample.shape), sample.throughput) for sample in samples)

    def cost(size: Size) -> float:
        return _cost(current, size)

    return Measured(size_of(current), known, cost, job.terms.choice)


def _same_but_for_size(job: JobFacts, current: brain.Shape, other: brain.Shape) -> bool:
    wanted = job.resized(current, size_of(other))
    if job.batches is None:
        return other == wanted
    # Reports round each worker's share: one global batch comes back as other totals at other sizes.
    rounding = sum(ring_shape(one).replicas * one.passes for one in (current, other)) / 2
    if abs(total_batch(other) - total_batch(current)) > rounding:
        return False
    return msgspec.structs.replace(other, batch=wanted.batch, passes=wanted.passes) == wanted


def _cost(current: brain.Shape, size: Size) -> float:
    """Return the hourly cost of a size's nodes; their number if their resources are unknown."""
    prices = Prices()
    use = use_of(resized(current, size.workers, size.servers or None).groups)
    each = {"accelerator": prices.accelerator, "cpu": prices.cpu}
    return sum(use.get(name, 0.0) * price for name, price in each.items()) or float(size.nodes)


def _more(cluster: brain.ClusterResources, group: NodeGroup) -> int:
    """Return how many more nodes of a group fit into the free resources; many if these are unknown."""
    each = use_of({"": msgspec.structs.replace(group, count=1)})
    known = [name for name in each if cluster.nodes]
    return int(min((cluster.free.get(name, 0.0) // each[name] for name in known), default=1e6))


def _fits(
    cluster: brain.ClusterResources, old: dict[str, NodeGroup], new: dict[str, NodeGroup]
) -> bool:
    """Return whether what a plan needs beyond the present nodes is free."""
    before, after = use_of(old), use_of(new)
    return not cluster.nodes or all(
        amount - before.get(name, 0.0) <= cluster.free.get(name, 0.0) + 1e-9
        for name, amount in after.items()
    )
