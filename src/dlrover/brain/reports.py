"""What each report writes into the database. A report counts once, however often it arrives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from dlrover._util import decoding
from dlrover.brain import tables
from dlrover.brain.writer import Batch
from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.spec import brain
from dlrover.spec.plan import NodeGroup, ResourcePlan

LEAST_THROUGHPUT = 1e-9
"""Least samples per second that a plan may predict: an outcome is compared with them."""
MASTER = "master"
"""Optimizer name for plans that a job's master has made itself."""


def write(batch: Batch, report: brain.Report, now: float) -> brain.Committed:
    """Write a report, unless it was written before.

    Raises:
        ConfigurationError: the job is not registered.
        ProtocolError: the report contradicts itself or what is known.
    """
    job = getattr(report, "job", "")
    if job and not isinstance(report, brain.RegisterJob) and not batch.has_job(job):
        raise ConfigurationError(f"The Brain knows no job {job}; dlrover brain jobs lists them.")
    if not batch.has_done(report.request):
        _write(batch, report, now)
        batch.note(report.request, now)
    return brain.Committed()


def _write(batch: Batch, report: brain.Report, now: float) -> None:
    match report:
        case brain.RegisterJob():
            _register(batch, report, now)
        case brain.ReportSamples():
            _samples(batch, report, now)
        case brain.ReportUsage():
            _usage(batch, report, now)
        case brain.ReportPlan():
            _plan(batch, report, now)
        case brain.ReportOutcome():
            _outcome(batch, report, now)
        case brain.ReportEnd():
            _end(batch, report, now)
        case brain.ReportCluster():
            _cluster(batch, report, now)
        case brain.SetQuota():
            _quota(batch, report)


def as_json(record: Any) -> str:
    """Return a record as the database keeps it.

    Raises:
        ProtocolError: the record could not be read again, since a number in it is not finite.
    """
    data = msgspec.json.encode(record)
    try:
        decoding.json(data, type(record))
    except msgspec.ValidationError as error:
        raise ProtocolError(f"A number is not finite: {error}.") from error
    return data.decode()


def checked(shape: brain.Shape) -> brain.Shape:
    """Return a shape after checking that it can be planned with.

    Raises:
        ProtocolError: it has no workers, or a group has a count below 1 or a negative amount.
    """
    if "worker" not in shape.groups:
        raise ProtocolError("A shape's groups must have worker.")
    _check_groups(shape.groups)
    return shape


def _check_groups(groups: Mapping[str, NodeGroup]) -> None:
    for kind, group in groups.items():
        least = min(group.cpu, group.memory, group.accelerators)
        if group.count < 1 or not least >= 0:
            raise ProtocolError(
                f"The group {kind} is {group}: count must be 1 or more, all else 0 or more."
            )


def insert_plan(
    batch: Batch, job: str, plan_id: str, plan: ResourcePlan, now: float, **more: Any
) -> None:
    """Write a plan; ``more`` is its optimizer and, if known, the previous shape."""
    shape = more.get("shape")
    batch.connection.execute(
        tables.plans.insert().values(
            id=plan_id,
            job=job,
            at=now,
            optimizer=more["optimizer"],
            plan=as_json(plan),
            shape=as_json(shape) if shape is not None else None,
        )
    )


def _register(batch: Batch, report: brain.RegisterJob, now: float) -> None:
    """Add a job, or update its description; an ended job runs again."""
    description = report.description
    space = description.space
    _check_groups(description.groups)
    for name, bounds in (("workers", space.workers), ("servers", space.servers)):
        if -(-bounds.least // bounds.unit) * bounds.unit > bounds.most:
            raise ProtocolError(
                f"space.{name} is {bounds.least} to {bounds.most} in units of {bounds.unit}: it must "
                "have a number."
            )
    values = {
        "mode": description.mode,
        "state": "running",
        "ended": None,
        "reason": "",
        "description": as_json(description),
    }
    if batch.has_job(report.job):
        batch.change_job(report.job, **values)
        _forget_end(batch, report.job)
    else:
        batch.add_job(report.job, values | {"registered": now, "throughput": 0.0, "done": 0.0})


def _samples(batch: Batch, report: brain.ReportSamples, now: float) -> None:
    for sample in report.samples:
        if sample.batches is not None and sample.batches.least > sample.batches.most:
            raise ProtocolError(
                f"batches.least is {sample.batches.least}: it must be at most batches.most, "
                f"{sample.batches.most}."
            )
    samples = [
        msgspec.structs.replace(sample, at=_time(sample.at, now), shape=checked(sample.shape))
        for sample in report.samples
    ]
    rows = ({"job": report.job, "at": s.at, "sample": as_json(s)} for s in samples)
    batch.insert(tables.samples, *rows)
    latest = max(reversed(samples), key=lambda sample: sample.at)  # the last of equal ones
    batch.change_job(
        report.job,
        shape=as_json(latest.shape),
        throughput=latest.throughput,
        done=max(sample.done for sample in samples),
    )


def _usage(batch: Batch, report: brain.ReportUsage, now: float) -> None:
    fields = ("node", "cpu", "memory", "accelerator", "progress")
    rows = [
        {"job": report.job, "at": _time(one.at, now)}
        | {name: getattr(one, name) for name in fields}
        for one in report.nodes
    ]
    batch.insert(tables.usages, *rows)
    _note_nodes(batch.connection, report, now)


def _time(at: float, now: float) -> float:
    """Return when something was measured: a record from the future would never grow old."""
    return min(at, now) if at else now


def _note_nodes(connection: Connection, report: brain.ReportUsage, now: float) -> None:
    """Keep what nodes use and their most, with few statements: a job may have thousands."""
    nodes = tables.nodes
    known = set(connection.scalars(sa.select(nodes.c.node).where(nodes.c.job == report.job)))
    new: list[dict[str, Any]] = []
    renewed: list[dict[str, Any]] = []
    for one in report.nodes:
        used = {"cpu": one.cpu, "memory": one.memory, "accelerator": one.accelerator}
        row = used | {"kind": one.kind, "heard": _time(one.at, now)}
        if one.node in known:
            renewed.append(row | {"name": one.node})
        else:
            known.add(one.node)
            most = {"most_cpu": one.cpu, "most_memory": one.memory}
            new.append(row | most | {"job": report.job, "node": one.node})
    if new:
        connection.execute(nodes.insert(), new)
    if renewed:
        connection.execute(_RENEW.where(nodes.c.job == report.job), renewed)


def _most(column: Any, used: Any) -> Any:
    return sa.case((column > used, column), else_=used)


_RENEW = (
    tables.nodes.update()
    .where(tables.nodes.c.node == sa.bindparam("name"))
    .values(
        {name: sa.bindparam(name) for name in ("kind", "heard", "cpu", "memory", "accelerator")}
        | {
            "most_cpu": _most(tables.nodes.c.most_cpu, sa.bindparam("cpu")),
            "most_memory": _most(tables.nodes.c.most_memory, sa.bindparam("memory")),
        }
    )
)


def _plan(batch: Batch, report: brain.ReportPlan, now: float) -> None:
    plans = tables.plans
    same = sa.select(plans.c.id).where(plans.c.id == report.plan_id)
    if batch.connection.scalar(same) is not None:
        raise ProtocolError(f"There is a plan {report.plan_id} already.")
    effect = report.plan.effect
    if effect is not None and effect.throughput < LEAST_THROUGHPUT:
        raise ProtocolError(
            f"plan.effect.throughput is {effect.throughput:g}: it must be at least {LEAST_THROUGHPUT:g}."
        )
    insert_plan(
        batch,
        report.job,
        report.plan_id,
        report.plan,
        now,
        optimizer=MASTER,
        shape=report.before,
    )


def _outcome(batch: Batch, report: brain.ReportOutcome, now: float) -> None:
    plans, outcomes = tables.plans, tables.outcomes
    owner = sa.select(plans.c.job).where(plans.c.id == report.plan_id)
    if batch.connection.scalar(owner) != report.job:
        raise ProtocolError(f"Job {report.job} has no plan {report.plan_id}.")
    values = {
        "at": now,
        "state": report.state,
        "throughput": report.throughput,
        "reason": _text(report.reason),
    }
    where = outcomes.c.plan == report.plan_id
    if not batch.connection.execute(outcomes.update().where(where).values(values)).rowcount:
        batch.connection.execute(outcomes.insert().values(values | {"plan": report.plan_id}))


def _text(text: str) -> str:
    """Return a text as every database takes it: PostgreSQL refuses NUL."""
    return text.replace("\0", "\ufffd")


def _end(batch: Batch, report: brain.ReportEnd, now: float) -> None:
    values: dict[str, Any] = {"state": report.state, "ended": now, "reason": _text(report.reason)}
    if report.shape is not None:
        values["shape"] = as_json(checked(report.shape))
    outcome = None if report.outcome is None else as_json(report.outcome)
    batch.change_job(report.job, **values)
    _forget_end(batch, report.job)
    if outcome is not None:
        row = {"job": report.job, "outcome": outcome}
        batch.connection.execute(tables.ends.insert().values(row))


def _forget_end(batch: Batch, job: str) -> None:
    batch.connection.execute(tables.ends.delete().where(tables.ends.c.job == job))


def _cluster(batch: Batch, report: brain.ReportCluster, now: float) -> None:
    names = [node.name for node in report.nodes]
    if len(set(names)) < len(names):
        raise ProtocolError("A report of the cluster names a machine twice.")
    batch.connection.execute(tables.cluster.delete())
    if report.nodes:
        rows = [{"name": one.name, "at": now, "node": as_json(one)} for one in report.nodes]
        batch.connection.execute(tables.cluster.insert(), rows)


def _quota(batch: Batch, report: brain.SetQuota) -> None:
    quotas = tables.quotas
    batch.connection.execute(quotas.delete().where(quotas.c.queue == report.queue))
    if report.limits:
        batch.connection.execute(
            quotas.insert().values(queue=report.queue, limits=as_json(report.limits))
        )
