"""What the Brain knows, read from the database: the jobs, past jobs and the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from dlrover._util import decoding
from dlrover.brain import tables
from dlrover.brain.machine.job import JobFacts, Past, tenant_of
from dlrover.errors import ConfigurationError
from dlrover.planning.shapes import added
from dlrover.planning.warmstart import LEAST_SIMILARITY, SIMILAR, PastJob, similarity
from dlrover.spec import brain
from dlrover.spec.outcome import Outcome
from dlrover.spec.plan import NodeGroup, PlanOutcome, ResourcePlan

SAMPLES = 60
"""Number of a job's latest samples from which plans are made."""
OUTCOMES = 20
"""Number of its latest plan outcomes from which plans are made."""
PAST = 500
"""Number of the latest ended jobs that are searched for similar ones."""
TALE_PLANS, TALE_SAMPLES = 100, 200
"""Maximum number of a job's plans and samples that are shown."""


def one_job(connection: Connection, job: str) -> JobFacts:
    """Return a job by its id, running or not.

    Raises:
        ConfigurationError: there is none.
    """
    found = _jobs(connection, tables.jobs.c.id == job)
    if not found:
        raise ConfigurationError(f"The Brain knows no job {job}; dlrover brain jobs lists them.")
    return found[0]


def cluster_jobs(connection: Connection) -> list[JobFacts]:
    """Return the running jobs of the mode ``cluster``."""
    jobs = tables.jobs
    return _jobs(connection, (jobs.c.state == "running") & (jobs.c.mode == "cluster"))


def _jobs(connection: Connection, where: Any) -> list[JobFacts]:
    jobs = tables.jobs
    rows = connection.execute(sa.select(jobs).where(where).order_by(jobs.c.id)).all()
    chosen = sa.select(jobs.c.id).where(where)
    samples = _samples(connection, chosen)
    outcomes = _outcomes(connection, chosen)
    return [_facts(row, samples.get(row.id, []), outcomes.get(row.id, [])) for row in rows]


def _facts(
    row: Any, samples: list[tuple[int, brain.Sample]], outcomes: list[PlanOutcome]
) -> JobFacts:
    return JobFacts(
        id=row.id,
        description=decoding.json(row.description, brain.Description),
        current=_shape(row.shape),
        samples=tuple(sample for _, sample in samples),
        outcomes=tuple(outcomes),
        done=row.done,
        version=max((number for number, _ in samples), default=0),
        heard=max([row.registered, *(sample.at for _, sample in samples)]),
    )


def _samples(connection: Connection, chosen: Any) -> dict[str, list[tuple[int, brain.Sample]]]:
    rows = _latest(connection, tables.samples, tables.samples.c.id, chosen, SAMPLES)
    found: dict[str, list[tuple[int, brain.Sample]]] = {}
    for row in rows:
        sample = decoding.json(row.sample, brain.Sample)
        found.setdefault(row.job, []).append((row.id, sample))
    return found


def _latest(connection: Connection, table: sa.Table, by: Any, chosen: Any, most: int) -> Any:
    """Return the last rows of each chosen job, the oldest first."""
    number = sa.func.row_number().over(partition_by=table.c.job, order_by=by.desc())
    numbered = sa.select(table, number.label("age")).where(table.c.job.in_(chosen)).subquery()
    query = sa.select(numbered).where(numbered.c.age <= most).order_by(numbered.c.age.desc())
    return connection.execute(query).all()


def _outcomes(connection: Connection, chosen: Any) -> dict[str, list[PlanOutcome]]:
    plans, outcomes = tables.plans, tables.outcomes
    query = (
        sa.select(plans.c.job, plans.c.plan, outcomes.c.throughput)
        .join_from(outcomes, plans)
        .where(plans.c.job.in_(chosen), outcomes.c.throughput > 0)
        .order_by(outcomes.c.at)
    )
    found: dict[str, list[PlanOutcome]] = {}
    for row in connection.execute(query):
        effect = decoding.json(row.plan, ResourcePlan).effect
        if effect is not None:
            found.setdefault(row.job, []).append(
                PlanOutcome(effect=effect, throughput=row.throughput)
            )
    return {job: of_job[-OUTCOMES:] for job, of_job in found.items()}


def _of_tenant(tenant: str) -> Any:
    """Return the condition for jobs of a tenant; an empty tenant selects the jobs that have none."""
    job = tables.jobs.c.id
    if not tenant:
        return ~job.contains(" ")
    # LIKE ignores case in SQLite; MySQL's "=" ignores a blank at the end.
    prefix = f"{tenant} "
    return job.contains(" ") & (sa.func.substr(job, 1, len(prefix)) == prefix)


def past_jobs(connection: Connection, tenant: str | None = None) -> Past:
    """Return the latest jobs that ended successfully: of one tenant, or of all."""
    jobs, nodes = tables.jobs, tables.nodes
    query = (
        sa.select(jobs)
        .where(jobs.c.state == "succeeded", jobs.c.shape.is_not(None))
        .where(sa.true() if tenant is None else _of_tenant(tenant))
        .order_by(jobs.c.ended.desc())
        .limit(PAST)
    )
    rows = connection.execute(query).all()
    if not rows:
        return Past((), ())
    memory = (
        sa.select(nodes.c.job, nodes.c.kind, sa.func.max(nodes.c.most_memory).label("memory"))
        .where(nodes.c.job.in_([row.id for row in rows]))
        .group_by(nodes.c.job, nodes.c.kind)
    )
    most = {(row.job, row.kind): int(row.memory) for row in connection.execute(memory)}
    return Past(
        tuple(_past(row, most) for row in rows),
        tuple(row.done for row in rows),
        tuple(tenant_of(row.id) for row in rows),
    )


def _past(row: Any, most: dict[tuple[str, str], int]) -> PastJob:
    description = decoding.json(row.description, brain.Description)
    shape = decoding.json(row.shape, brain.Shape)
    groups: dict[str, NodeGroup] = {
        kind: msgspec.structs.replace(group, memory=most.get((row.id, kind), group.memory))
        for kind, group in shape.groups.items()
    }
    return PastJob(description.name, description.features, groups)


def similar(connection: Connection, job: str) -> brain.Similar:
    """Return the measurements of the past job most like ``job``, preferring the near ones with several sizes.

    Raises:
        ConfigurationError: the job is not known.
    """
    asking = one_job(connection, job).description
    jobs = tables.jobs
    query = sa.select(jobs.c.id, jobs.c.description).where(
        jobs.c.state == "succeeded", _of_tenant(tenant_of(job))
    )
    near = []
    for row in connection.execute(query.order_by(jobs.c.ended.desc()).limit(PAST)):
        past = decoding.json(row.description, brain.Description)
        alike = similarity(asking.features, past.features)
        if past.strategy == asking.strategy and alike >= LEAST_SIMILARITY:
            near.append((alike, row.id, past.name))
    near = sorted(near, key=lambda one: -one[0])[:SIMILAR]
    samples = _samples(connection, [name for _, name, _ in near]) if near else {}
    found = [
        brain.Similar(name=name, similarity=alike, samples=tuple(s for _, s in samples[id_]))
        for alike, id_, name in near
        if id_ in samples
    ]
    several = [
        one for one in found if len({s.shape.groups["worker"].count for s in one.samples}) > 1
    ]
    return next(iter([*several, *found]), brain.Similar())


def the_cluster(connection: Connection) -> brain.ClusterResources:
    """Return the cluster's resources, as last reported."""
    rows = connection.execute(sa.select(tables.cluster).order_by(tables.cluster.c.name)).all()
    nodes = tuple(decoding.json(row.node, brain.ClusterNode) for row in rows)
    ready = [node for node in nodes if node.ready]
    capacity = added(node.capacity for node in ready)
    used = added(node.used for node in ready)
    free = {name: max(0.0, amount - used.get(name, 0.0)) for name, amount in capacity.items()}
    limits = {
        row.queue: decoding.json(row.limits, brain.Use)
        for row in connection.execute(sa.select(tables.quotas))
    }
    seen = max((row.at for row in rows), default=0.0)
    return brain.ClusterResources(
        nodes=nodes, seen=seen, capacity=capacity, free=free, quotas=limits
    )


# ---- for display


def job_rows(
    connection: Connection, asked: brain.AskJobs, tenant: str = ""
) -> tuple[brain.JobRow, ...]:
    """Return the jobs of a tenant, or all jobs, the latest first."""
    jobs = tables.jobs
    query = sa.select(jobs).order_by(jobs.c.registered.desc(), jobs.c.id).limit(asked.limit)
    if tenant:
        query = query.where(_of_tenant(tenant))
    if asked.running:
        query = query.where(jobs.c.state == "running")
    if asked.origin:
        origin = f'"origin":{msgspec.json.encode(asked.origin).decode()}'
        query = query.where(jobs.c.description.contains(origin, autoescape=True))
    return _rows(connection, connection.execute(query).all())


def _rows(connection: Connection, rows: Sequence[Any]) -> tuple[brain.JobRow, ...]:
    names = [row.id for row in rows]
    counts = [_counts(connection, table, names) for table in (tables.samples, tables.plans)]
    return tuple(
        brain.JobRow(
            job=row.id,
            description=decoding.json(row.description, brain.Description),
            state=row.state,
            registered=row.registered,
            ended=row.ended,
            reason=row.reason,
            samples=counts[0].get(row.id, 0),
            plans=counts[1].get(row.id, 0),
            shape=_shape(row.shape),
            throughput=row.throughput,
        )
        for row in rows
    )


def _counts(connection: Connection, table: sa.Table, names: Sequence[str]) -> dict[str, int]:
    query = sa.select(table.c.job, sa.func.count()).where(table.c.job.in_(names))
    rows = connection.execute(query.group_by(table.c.job)).all()
    return {job: int(count) for job, count in rows}


def story(connection: Connection, job: str) -> brain.Story:
    """Return all that is known of a job.

    Raises:
        ConfigurationError: there is none.
    """
    jobs, nodes = tables.jobs, tables.nodes
    row = connection.execute(sa.select(jobs).where(jobs.c.id == job)).one_or_none()
    if row is None:
        raise ConfigurationError(f"The Brain knows no job {job}; dlrover brain jobs lists them.")
    end = connection.scalar(sa.select(tables.ends.c.outcome).where(tables.ends.c.job == job))
    used = sa.select(nodes).where(nodes.c.job == job).order_by(nodes.c.node)
    samples = _latest(connection, tables.samples, tables.samples.c.id, [job], TALE_SAMPLES)
    return brain.Story(
        job=_rows(connection, [row])[0],
        plans=tuple(_record(found) for found in _plans(connection, job)),
        nodes=tuple(_node(found) for found in connection.execute(used)),
        samples=tuple(decoding.json(found.sample, brain.Sample) for found in samples),
        outcome=None if end is None else decoding.json(end, Outcome),
    )


def _plans(connection: Connection, job: str) -> list[Any]:
    plans, outcomes = tables.plans, tables.outcomes
    query = (
        sa.select(plans, outcomes.c.state, outcomes.c.throughput, outcomes.c.reason)
        .join_from(plans, outcomes, isouter=True)
        .where(plans.c.job == job)
        .order_by(plans.c.at.desc())
        .limit(TALE_PLANS)
    )
    return list(reversed(connection.execute(query).all()))


def plan_by_id(connection: Connection, plan_id: str) -> brain.PlanRecord | None:
    """Return a plan; None if it was not made."""
    plans = tables.plans
    query = sa.select(
        plans, sa.null().label("state"), sa.null().label("throughput"), sa.null().label("reason")
    ).where(plans.c.id == plan_id)
    row = connection.execute(query).one_or_none()
    return None if row is None else _record(row)


def _record(row: Any) -> brain.PlanRecord:
    plan = decoding.json(row.plan, ResourcePlan)
    outcome = None
    if row.throughput and plan.effect is not None:
        outcome = PlanOutcome(effect=plan.effect, throughput=row.throughput)
    return brain.PlanRecord(
        plan_id=row.id,
        at=row.at,
        optimizer=row.optimizer,
        plan=plan,
        before=_shape(row.shape),
        state=row.state,
        measured=row.throughput or 0.0,
        error=outcome.error if outcome else None,
        within=outcome.within if outcome else None,
        reason=row.reason or "",
    )


def _node(row: Any) -> brain.NodeRecord:
    return brain.NodeRecord(
        **{name: getattr(row, name) for name in brain.NodeRecord.__struct_fields__}
    )


def _shape(text: str | None) -> brain.Shape | None:
    return None if text is None else decoding.json(text, brain.Shape)
