"""``dlrover plan``: a job's scaling plans, with predictions beside measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dlrover.errors import kind_of
from dlrover.master.journal import history
from dlrover.spec import events
from dlrover.spec.jobdir import JobDir, MasterConfig, decode
from dlrover.spec.node import Size
from dlrover.spec.plan import Effect, ScaleKind


class PlanHistory(msgspec.Struct, frozen=True, kw_only=True):
    """One plan and its outcome."""

    number: int
    time: float
    """When it was made, seconds since the epoch."""
    kind: ScaleKind
    before: int
    """Nodes that the job had; in a job with servers, those of role worker."""
    nodes: int
    """Nodes that the plan wants."""
    servers_before: int = 0
    """Parameter servers that the job had."""
    servers: int = 0
    """Parameter servers that the plan wants."""
    reason: str
    predicted: Effect | None
    measured: float | None = None
    """Measured throughput; None before, and for a plan that was given up."""
    error: float | None = None
    """Difference between measurement and prediction, relative to the prediction."""
    within: bool | None = None
    """True if the measurement lies in the predicted interval."""
    unit: str
    """Unit of the throughputs: ``samples/s`` or ``worker steps/s``."""
    outcome: str = "under way"
    """``under way``, ``kept``, ``does not pay``, or why it was given up."""


class NodeChange(msgspec.Struct, frozen=True, kw_only=True):
    """Replacement of a node by another one."""

    time: float
    """When it was decided, seconds since the epoch."""
    node: int
    successor: int
    reason: str
    outcome: str = "under way"
    """``under way``, ``done``, or why it was given up."""


class Plans(msgspec.Struct, frozen=True, kw_only=True):
    """All plans of a job."""

    job_dir: str
    auto_scale: bool
    """True if the job was started with auto-scaling."""
    min_nodes: int
    max_nodes: int
    min_servers: int = 0
    """0: a job without servers."""
    max_servers: int = 0
    settled: events.SizeSettled | None
    """Result of the search; None while it goes on."""
    ended: str
    """Why auto-scaling has ended; empty if it has not."""
    plans: tuple[PlanHistory, ...]
    nodes: tuple[NodeChange, ...] = ()
    """Replacements of nodes."""


def plans(job_dir: JobDir) -> Plans:
    """Return the plans of the job in ``job_dir``, from its events.

    Raises:
        ConfigurationError: the job's files cannot be read.
    """
    try:
        happened = history.read(job_dir.events)
        job = decode(job_dir.job, job_dir.job.read_bytes(), MasterConfig).job
    except (OSError, msgspec.DecodeError) as error:
        raise kind_of(error)(
            f"--job-dir {job_dir.path} has no readable record of plans: {error}."
        ) from error
    settled, ended = None, ""
    for event in happened:
        body = event.body
        if isinstance(body, events.SizeSettled):
            settled = body
        elif isinstance(body, events.AutoScalingEnded):
            ended = body.reason
        elif isinstance(body, events.PlanMade):
            settled = None
    return Plans(
        job_dir=str(job_dir.path),
        auto_scale=job.auto_scale,
        min_nodes=job.min_nodes,
        max_nodes=job.max_nodes,
        min_servers=job.min_servers,
        max_servers=job.max_servers,
        settled=settled,
        ended=ended,
        plans=records((event.time, event.body) for event in happened),
        nodes=_node_changes(happened),
    )


def records(happened: Iterable[tuple[float, events.EventBody]]) -> tuple[PlanHistory, ...]:
    """Return the plans among a job's events, which come with their times."""
    found: dict[int, PlanHistory] = {}
    for at, body in happened:
        if isinstance(body, events.PlanMade):
            found[body.number] = _made(body, at)
        elif isinstance(body, events.PlanMeasured | events.PlanDropped) and body.number in found:
            found[body.number] = _known(found[body.number], body)
    return tuple(found.values())


def _node_changes(happened: Sequence[events.Event]) -> tuple[NodeChange, ...]:
    found: dict[int, NodeChange] = {}  # the latest change of each node
    done = []
    for event in happened:
        body = event.body
        if isinstance(body, events.NodeMigrates):
            found[body.node] = NodeChange(
                time=event.time, node=body.node, successor=body.successor, reason=body.reason
            )
        elif isinstance(body, events.MigrationEnded | events.NodeReleased | events.NodeLost):
            change = found.pop(body.node, None)
            if change is not None:
                done.append(msgspec.structs.replace(change, outcome=_end(body)))
    return tuple(sorted((*done, *found.values()), key=lambda change: change.time))


def _end(body: events.MigrationEnded | events.NodeReleased | events.NodeLost) -> str:
    if isinstance(body, events.MigrationEnded):
        return f"given up: {body.reason}"
    return "done" if isinstance(body, events.NodeReleased) else "it was lost before that"


def render(report: Plans) -> str:
    """Return a job's plans as text."""
    lines = [_headline(report), *(line for plan in report.plans for line in _lines(plan))]
    for change in report.nodes:
        lines += ["", f"node {change.successor} in place of node {change.node}: {change.reason}"]
        lines.append(f"  {change.outcome}")
    return "\n".join(lines)


def _lines(plan: PlanHistory) -> list[str]:
    lines = ["", f"plan {plan.number}, {plan.kind.value}: {plan.reason}"]
    known = []
    if plan.predicted is not None:
        known.append(f"predicted {interval(plan.predicted)} {plan.unit}")
    if plan.measured is not None and plan.error is not None:
        known.append(f"measured {plan.measured:.3g} ({plan.error:+.0%})")
    return [*lines, "  " + ", ".join([*known, plan.outcome])]


def _headline(report: Plans) -> str:
    if not report.auto_scale:
        return "The job has a fixed number of nodes; --auto-scale lets DLRover choose it."
    span = _span(report.min_nodes, report.max_nodes, "node")
    if report.max_servers:
        workers = _span(report.min_nodes, report.max_nodes, "worker")
        span = f"{workers} and {_span(report.min_servers, report.max_servers, 'server')}"
    if report.ended:
        return f"Auto-scaling {span} has ended: {report.ended}."
    if report.settled is None:
        return f"Auto-scaling {span}: the search for the best size goes on."
    settled = report.settled
    return (
        f"Auto-scaling {span}: the best size is {Size(settled.nodes, settled.servers).in_words()}, with "
        f"{settled.throughput:.3g} {settled.unit}; {settled.tried} sizes were measured."
    )


def _span(least: int, most: int, what: str) -> str:
    if least == most:
        return f"with {least} {what}{'' if least == 1 else 's'}"
    return f"from {least} to {most} {what}s"


def interval(effect: Effect) -> str:
    """Return a predicted throughput as ``20 (10 to 40)``."""
    return f"{effect.throughput:.3g} ({effect.low:.3g} to {effect.high:.3g})"


def _made(body: events.PlanMade, time: float) -> PlanHistory:
    return PlanHistory(
        number=body.number,
        time=time,
        kind=body.kind,
        before=body.before,
        nodes=body.nodes,
        servers_before=body.servers_before,
        servers=body.servers,
        reason=body.reason,
        predicted=body.effect,
        unit=body.unit,
    )


def _known(plan: PlanHistory, body: events.PlanMeasured | events.PlanDropped) -> PlanHistory:
    if isinstance(body, events.PlanDropped):
        return msgspec.structs.replace(plan, outcome=f"given up: {body.reason}")
    return msgspec.structs.replace(
        plan,
        measured=body.throughput,
        error=body.error,
        within=body.within,
        outcome="does not pay" if body.short else "kept",
    )
