"""The built-in optimiser of single jobs: each gets what pays for itself, of what is free."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dlrover.brain.known import Job, Past
from dlrover.brain.shapes import (
    Models,
    allowed,
    counts_near,
    server_shape,
    terms_of,
    use_of,
)
from dlrover.planning.allreduce import RingModel
from dlrover.planning.measured import ring_shape
from dlrover.planning.parameter_server import ServerModel
from dlrover.planning.plans import (
    RingSpace,
    ServerSpace,
    plan_ring,
    plan_servers,
    sample_ring,
    sample_servers,
)
from dlrover.planning.warmstart import warm_start
from dlrover.spec import brain
from dlrover.spec.plan import Group, Plan

STAYS = "no size near what was measured is worth a change"
NO_SAMPLES = "no throughput of the job has been reported yet"


class SingleJobOptimizer:
    """Plans one job by its own samples; its first plan by similar past jobs."""

    whole = False

    def __init__(self) -> None:
        self._models = Models()

    def advise(
        self, jobs: Sequence[Job], past: Past, cluster: brain.Cluster
    ) -> dict[str, brain.Advice]:
        """What each job should have next, each planned for itself."""
        return {job.id: self._advise(job, past, cluster) for job in jobs}

    def _advise(self, job: Job, past: Past, cluster: brain.Cluster) -> brain.Advice:
        if job.current is None:
            first = first_plan(job.description, past)
            return brain.Advice(plan=first, reason=first.reason)
        model = self._models.of(job)
        if model is None:
            return brain.Advice(reason=NO_SAMPLES)
        if isinstance(model, RingModel):
            plan = _plan_ring(job, job.current, model, cluster)
        else:
            plan = _plan_servers(job, job.current, model, cluster)
        if plan is None:
            return brain.Advice(reason=STAYS)
        return brain.Advice(plan=plan, reason=plan.reason)


def first_plan(description: brain.Description, past: Past) -> Plan:
    """What a job begins with: like similar past jobs, within what its user has set."""
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
    """A group with what the user has set, and where that is open what was guessed."""
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
    nodes = [count for count in counts_near(job, "worker") if count <= most]
    space = RingSpace(nodes=nodes, per_node=current.per_node, cpu=worker.cpu)
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
    )
    plan = plan_servers(model, space, shape, terms) or sample_servers(model, space, shape, terms)
    if plan is None or not fits(cluster, current.groups, plan.groups):
        return None
    return plan


def room(cluster: brain.Cluster, group: Group) -> int:
    """How many more nodes of a group fit into what is free; many where nobody told what there is."""
    each = use_of({"": msgspec.structs.replace(group, count=1)})
    known = [name for name in each if cluster.nodes]
    return int(min((cluster.free.get(name, 0.0) // each[name] for name in known), default=1e6))


def fits(cluster: brain.Cluster, old: dict[str, Group], new: dict[str, Group]) -> bool:
    """Whether what a plan wants beyond the present nodes is free."""
    before, after = use_of(old), use_of(new)
    return not cluster.nodes or all(
        amount - before.get(name, 0.0) <= cluster.free.get(name, 0.0) + 1e-9
        for name, amount in after.items()
    )
