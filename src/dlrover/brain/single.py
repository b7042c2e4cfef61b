"""The built-in optimizer of single jobs: gives each job the free resources that pay for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import msgspec

from dlrover.brain.known import Job, Past
from dlrover.brain.shapes import (
    Models,
    allowed,
    batches_of,
    counts_near,
    predict,
    resized,
    server_shape,
    terms_of,
    total_batch,
    use_of,
    with_batch,
)
from dlrover.planning.allreduce import RingModel
from dlrover.planning.measured import latest_of_each, ring_shape
from dlrover.planning.neighbours import beside, neighbours, possible, within_reach
from dlrover.planning.parameter_server import ServerModel
from dlrover.planning.plans import (
    RingSpace,
    ServerSpace,
    plan_ring,
    plan_servers,
    sample_ring,
    sample_servers,
)
from dlrover.planning.search import Prices, worth
from dlrover.planning.warmstart import warm_start
from dlrover.spec import brain
from dlrover.spec.plan import Group, Plan
from dlrover.spec.roles import Size

STAYS = "no size near what was measured is worth a change"
NO_SAMPLES = "no throughput of the job has been reported yet"


class SingleJobOptimizer:
    """Optimizer that plans each job by its own samples, and its first plan by similar past jobs."""

    whole = False

    def __init__(self) -> None:
        self._models = Models()

    def advise(
        self, jobs: Sequence[Job], past: Past, cluster: brain.Cluster
    ) -> dict[str, brain.Advice]:
        """Return what each job should have next; each job is planned separately."""
        return {job.id: self._advise(job, past, cluster) for job in jobs}

    def _advise(self, job: Job, past: Past, cluster: brain.Cluster) -> brain.Advice:
        if job.current is None:
            first = first_plan(job.description, past)
            return brain.Advice(plan=first, reason=first.reason)
        model = self._models.of(job)
        if model is None:
            return brain.Advice(reason=NO_SAMPLES)
        plan = _back_to_best(job, job.current, cluster)
        if plan is None and isinstance(model, RingModel):
            plan = _plan_ring(job, job.current, model, cluster)
        elif plan is None and isinstance(model, ServerModel):
            plan = _plan_servers(job, job.current, model, cluster)
        plan = plan or _plan_neighbour(job, job.current, model, cluster)
        if plan is None:
            return brain.Advice(reason=STAYS)
        return brain.Advice(plan=plan, reason=plan.reason)


def first_plan(description: brain.Description, past: Past) -> Plan:
    """Return a job's first plan: like similar past jobs, within what its user has set."""
    kinds = ("worker", "ps") if description.strategy == "ps" else ("worker",)
    found = warm_start(description.features, past.jobs)
    reason = found.reason if found else "no similar past job is known: it starts with the least"
    space = {"worker": description.space.workers, "ps": description.space.servers}
    groups = {}
    for kind in kinds:
        guess = found.groups.get(kind) if found else None
        counts = allowed(space[kind])
        count = max((n for n in counts if guess and n <= guess.count), default=counts[0])
        groups[kind] = _given(description.groups.get(kind), guess, count)
    return Plan(groups=groups, reason=reason)


def _given(given: Group | None, guess: Group | None, count: int) -> Group:
    """Return a group with what the user has set, completed by what was guessed."""
    given, guess = given or Group(count=count), guess or Group(count=count)
    return Group(
        count=count,
        cpu=given.cpu or guess.cpu,
        memory=given.memory or guess.memory,
        accelerators=given.accelerators or guess.accelerators,
    )


def _plan_ring(
    job: Job, current: brain.Shape, model: RingModel, cluster: brain.Cluster
) -> Plan | None:
    worker = current.groups["worker"]
    most = worker.count + room(cluster, worker)
    known = _known(job, current)  # measurements take precedence over predictions
    nodes = [n for n in counts_near(job, "worker") if n <= most and Size(n) not in known]
    space = RingSpace(
        nodes=nodes,
        per_node=current.per_node,
        cpu=worker.cpu,
        total_batch=total_batch(current) if batches_of(job) is not None else 0,
    )
    shape, terms = ring_shape(current), terms_of(job)
    plan = plan_ring(model, space, shape, terms) or sample_ring(model, space, shape, terms)
    if plan is None:
        return None
    groups = {"worker": msgspec.structs.replace(worker, count=plan.groups["worker"].count)}
    return msgspec.structs.replace(plan, groups=groups)


def _plan_servers(
    job: Job, current: brain.Shape, model: ServerModel, cluster: brain.Cluster
) -> Plan | None:
    worker, server = current.groups["worker"], current.groups.get("ps", Group(count=1))
    bounds, shape, terms = job.description.space, server_shape(current), terms_of(job)
    most_workers = worker.count + room(cluster, worker)
    most_servers = server.count + room(cluster, server)
    space = ServerSpace(
        workers=[count for count in counts_near(job, "worker") if count <= most_workers],
        servers=[count for count in counts_near(job, "ps") if count <= most_servers],
        worker_cpu=bounds.worker_cpu or (shape.worker_cpu,),
        server_cpu=bounds.server_cpu or (shape.server_cpu,),
        worker_memory=worker.memory,
        server_memory=server.memory * server.count,
        closed=frozenset(_known(job, current)),
    )
    plan = plan_servers(model, space, shape, terms) or sample_servers(model, space, shape, terms)
    if plan is None or not fits(cluster, current.groups, plan.groups):
        return None
    return plan


def _back_to_best(job: Job, current: brain.Shape, cluster: brain.Cluster) -> Plan | None:
    """Return the best measured size that is free, if it is worth more than the present one."""
    here, known, choice = _size(current), _known(job, current), terms_of(job).choice
    values = {size: worth(speed, _cost(current, size), choice) for size, speed in known.items()}
    free = [s for s in known if fits(cluster, current.groups, _resized(job, current, s).groups)]
    best = max(free, key=lambda size: values[size], default=here)
    if here not in known or values[best] <= (1 + choice.gain) * values[here]:
        return None
    faster = known[best] / known[here] - 1
    return Plan(
        groups=_resized(job, current, best).groups,
        reason=f"{_told(here)} -> {_told(best)}: {faster:+.0%} throughput, as it was measured before",
    )


def _plan_neighbour(
    job: Job, current: brain.Shape, model: RingModel | ServerModel, cluster: brain.Cluster
) -> Plan | None:
    """Return a size next to the present, best measured one that no measurement rules out."""
    here, known, choice = _size(current), _known(job, current), terms_of(job).choice
    if here not in known:
        return None

    def value(throughput: float, size: Size) -> float:
        return worth(throughput, _cost(current, size), choice)

    servers = counts_near(job, "ps") if here.servers else ()
    sizes = beside(here, counts_near(job, "worker"), servers)
    open_ = [size for size in sizes if size not in known]
    least = (1 + choice.gain) * value(known[here], here)
    near = within_reach(known.keys(), possible(open_, known, value, least))
    shapes = {size: _resized(job, current, size) for size in neighbours(here, known.keys(), near)}
    tops = {
        size: value(predict(model, shape).high, size)
        for size, shape in shapes.items()
        if fits(cluster, current.groups, shape.groups)
    }
    if not tops:
        return None
    target = max(tops, key=lambda size: tops[size])
    effect = predict(model, shapes[target]).effect(before=known[here], cost=_cost(current, target))
    return Plan(
        groups=shapes[target].groups,
        reason=f"{_told(here)} -> {_told(target)}: to be measured, because no measurement rules out that it is "
        "the best size",
        effect=effect,
    )


def _size(shape: brain.Shape) -> Size:
    groups = shape.groups
    return Size(groups["worker"].count, groups["ps"].count if "ps" in groups else 0)


def _told(size: Size) -> str:
    return size.sentence_part() if size.servers else f"{size.workers} nodes"


def _resized(job: Job, current: brain.Shape, size: Size) -> brain.Shape:
    shape, batches = resized(current, size.workers, size.servers or None), batches_of(job)
    if batches is None:
        return shape
    return with_batch(shape, total_batch(current), batches.pass_most)


def _known(job: Job, current: brain.Shape) -> dict[Size, float]:
    """Return the mean throughput by size, of the latest samples that differ from ``current`` only in size."""
    found: dict[Size, list[float]] = {}
    for sample in latest_of_each(job.samples):
        size = _size(sample.shape)
        if _same_but_for_size(job, current, sample.shape):
            found.setdefault(size, []).append(sample.throughput)
    return {size: mean(values) for size, values in found.items()}


def _same_but_for_size(job: Job, current: brain.Shape, other: brain.Shape) -> bool:
    wanted = _resized(job, current, _size(other))
    if batches_of(job) is None:
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


def room(cluster: brain.Cluster, group: Group) -> int:
    """Return how many more nodes of a group fit into the free resources; many if these are unknown."""
    each = use_of({"": msgspec.structs.replace(group, count=1)})
    known = [name for name in each if cluster.nodes]
    return int(min((cluster.free.get(name, 0.0) // each[name] for name in known), default=1e6))


def fits(cluster: brain.Cluster, old: dict[str, Group], new: dict[str, Group]) -> bool:
    """Return whether what a plan needs beyond the present nodes is free."""
    before, after = use_of(old), use_of(new)
    return not cluster.nodes or all(
        amount - before.get(name, 0.0) <= cluster.free.get(name, 0.0) + 1e-9
        for name, amount in after.items()
    )
