"""``dlrover plan``: what the auto-scaler of a job has done, with its predictions beside what was measured."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from dlrover.errors import ConfigurationError
from dlrover.master import history
from dlrover.spec import events
from dlrover.spec.jobdir import JobDir, MasterConfig
from dlrover.spec.plan import Effect
from dlrover.spec.speed import ScaleKind


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One plan and what came of it. Throughputs are samples per second."""

    number: int
    time: float
    """When it was made, seconds since the epoch."""
    kind: ScaleKind
    before: int
    """Nodes that the job had."""
    nodes: int
    """Nodes that it was to have."""
    reason: str
    predicted: Effect | None
    measured: float | None = None
    """None until it is, and for a plan that was given up."""
    error: float | None = None
    """By how much it differs from the prediction, relative to that."""
    within: bool | None = None
    """Whether it lies in the predicted interval."""
    outcome: str = "under way"
    """``under way``, ``kept``, ``does not pay``, or why it was given up."""


class Plans(msgspec.Struct, frozen=True, kw_only=True):
    """All plans of a job."""

    job_dir: str
    auto_scale: bool
    """Whether the job was started with auto-scaling."""
    min_nodes: int
    max_nodes: int
    settled: events.SizeSettled | None
    """What the search has found; None while it goes on."""
    ended: str
    """Why auto-scaling has ended; empty if it has not."""
    plans: tuple[PlanRecord, ...]


def plans(job_dir: JobDir) -> Plans:
    """The plans of the job in ``job_dir``, from its events.

    Raises:
        ConfigurationError: the job's files cannot be read.
    """
    try:
        told = history.read(job_dir.events)
        job = msgspec.json.decode(job_dir.job.read_bytes(), type=MasterConfig).job
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"--job-dir {job_dir.path} does not tell of plans: {error}."
        ) from error
    found: dict[int, PlanRecord] = {}
    settled, ended = None, ""
    for event in told:
        body = event.body
        if isinstance(body, events.SizeSettled):
            settled = body
        elif isinstance(body, events.AutoScalingEnded):
            ended = body.reason
        elif isinstance(body, events.PlanMade):
            settled = None
            found[body.number] = _made(body, event.time)
        elif isinstance(body, events.PlanMeasured | events.PlanDropped) and body.number in found:
            found[body.number] = _known(found[body.number], body)
    return Plans(
        job_dir=str(job_dir.path),
        auto_scale=job.auto_scale,
        min_nodes=job.min_nodes,
        max_nodes=job.max_nodes,
        settled=settled,
        ended=ended,
        plans=tuple(found.values()),
    )


def render(report: Plans, console: Console) -> None:
    """Print a job's plans for people."""
    console.print(_headline(report), highlight=False)
    if not report.plans:
        return
    table = Table(box=None, pad_edge=False)
    for name in ("plan", "nodes", "predicted", "measured", "error", "outcome", "reason"):
        table.add_column(name, overflow="fold")
    for plan in report.plans:
        expected = plan.predicted
        table.add_row(
            f"{plan.number} {plan.kind.value}",
            f"{plan.before} -> {plan.nodes}",
            "" if expected is None else _interval(expected),
            "" if plan.measured is None else f"{plan.measured:.3g}",
            "" if plan.error is None else f"{plan.error:+.0%}",
            plan.outcome,
            plan.reason,
        )
    console.print(table, highlight=False)
    console.print("Predicted and measured are samples per second.", highlight=False)


def _headline(report: Plans) -> str:
    if not report.auto_scale:
        return "The job has a fixed number of nodes; --auto-scale lets DLRover choose it."
    span = f"from {report.min_nodes} to {report.max_nodes} nodes"
    if report.ended:
        return f"Auto-scaling {span} has ended: {report.ended}."
    if report.settled is None:
        return f"Auto-scaling {span}: the best size is being looked for."
    settled = report.settled
    return (
        f"Auto-scaling {span}: {settled.nodes} nodes pay best, with {settled.throughput:.3g} samples/s; "
        f"{settled.tried} sizes were measured."
    )


def _interval(effect: Effect) -> str:
    return f"{effect.throughput:.3g} ({effect.low:.3g} to {effect.high:.3g})"


def _made(body: events.PlanMade, time: float) -> PlanRecord:
    return PlanRecord(
        number=body.number,
        time=time,
        kind=body.kind,
        before=body.before,
        nodes=body.nodes,
        reason=body.reason,
        predicted=body.effect,
    )


def _known(plan: PlanRecord, body: events.PlanMeasured | events.PlanDropped) -> PlanRecord:
    if isinstance(body, events.PlanDropped):
        return msgspec.structs.replace(plan, outcome=f"given up: {body.reason}")
    return msgspec.structs.replace(
        plan,
        measured=body.throughput,
        error=body.error,
        within=body.within,
        outcome="does not pay" if body.short else "kept",
    )
