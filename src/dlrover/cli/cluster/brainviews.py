"""Text output of ``dlrover brain``."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from dlrover.spec import brain
from dlrover.spec.plan import Effect, Group

GIB = 1 << 30


def jobs(rows: tuple[brain.JobRow, ...], console: Console) -> None:
    """Print a line for each job."""
    if not rows:
        console.print("The Brain knows no job.")
        return
    table = Table("job", "name", "mode", "state", "size", "samples/s", "samples", "plans", box=None)
    for row in rows:
        table.add_row(
            row.job,
            row.description.name,
            row.description.mode,
            row.state,
            _counts(row.shape.groups) if row.shape else "-",
            f"{row.throughput:,.4g}" if row.throughput else "-",
            str(row.samples),
            str(row.plans),
        )
    console.print(table)


def story(story: brain.Story, console: Console) -> None:
    """Print a job, its measurements, and each plan with its outcome."""
    row = story.job
    ended = f": {row.reason}" if row.reason else ""
    console.print(
        f"[bold]{row.job}[/] ({row.description.name}): {row.state}{ended}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"{row.description.strategy}, optimizeMode {row.description.mode}, {row.samples} samples"
        + (f", {size(row.shape.groups)}, {row.throughput:,.4g} samples/s" if row.shape else ""),
        highlight=False,
        soft_wrap=True,
    )
    if not story.plans:
        console.print("It has had no plan.")
        return
    for record in story.plans:
        console.print()
        _plan(record, console)
    errors = [abs(record.error) for record in story.plans if record.error is not None]
    if errors:
        inside = sum(1 for record in story.plans if record.within)
        console.print(
            f"\nPredictions: {len(errors)} measured, mean error {sum(errors) / len(errors):.1%}, "
            f"{inside} in their interval.",
            highlight=False,
            soft_wrap=True,
        )


def _plan(record: brain.PlanRecord, console: Console) -> None:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.at))
    console.print(
        f"{at}  {size(record.plan.groups)}  by {record.optimizer}", highlight=False, soft_wrap=True
    )
    console.print(f"  why        {record.plan.reason}", highlight=False, soft_wrap=True)
    if record.plan.effect is not None:
        console.print(
            f"  predicted  {_effect(record.plan.effect)}", highlight=False, soft_wrap=True
        )
    console.print(f"  outcome    {_outcome(record)}", highlight=False, soft_wrap=True)


def _outcome(record: brain.PlanRecord) -> str:
    if record.state is None:
        return "not reported yet"
    said = record.state + (f": {record.reason}" if record.reason else "")
    if record.measured:
        said += f", {record.measured:,.4g} samples/s measured"
    if record.error is not None:
        where = "in the interval" if record.within else "outside of the interval"
        said += f", error {record.error:+.1%}, {where}"
    return said


def expected(job: str, found: brain.Expected, console: Console) -> None:
    """Print the predicted effect of a change of a job's size."""
    effect = found.plan.effect
    assert effect is not None
    console.print(
        f"{job}: {size(found.before.groups)} -> {size(found.shape.groups)}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"  predicted  {_effect(effect)}", highlight=False, soft_wrap=True)
    console.print(
        f"  now        {effect.before:,.4g} samples/s by the model: {found.plan.reason}",
        highlight=False,
        soft_wrap=True,
    )
    if not found.inside:
        console.print("  This is farther from what was measured than a plan would go.")


def cluster(found: brain.Cluster, console: Console) -> None:
    """Print the cluster's machines, free resources and quotas."""
    if not found.nodes:
        console.print("Nobody has told the Brain what the cluster has.")
    else:
        seen = max(0.0, time.time() - found.seen)
        ready = sum(1 for node in found.nodes if node.ready)
        console.print(
            f"{ready} of {len(found.nodes)} machines ready, seen {seen:.0f} s ago",
            highlight=False,
            soft_wrap=True,
        )
        table = Table("resource", "capacity", "free", box=None)
        for name, amount in sorted(found.capacity.items()):
            table.add_row(name, _amount(name, amount), _amount(name, found.free.get(name, 0.0)))
        console.print(table)
    for queue, limits in sorted(found.quotas.items()):
        console.print(f"queue {queue}: {_use(limits)}", highlight=False, soft_wrap=True)


def size(groups: Mapping[str, Group]) -> str:
    """Return the nodes of a plan or a shape in words."""
    return ", ".join(_group(kind, group) for kind, group in groups.items())


def _counts(groups: Mapping[str, Group]) -> str:
    return ", ".join(f"{group.count} {kind}" for kind, group in groups.items())


def _group(kind: str, group: Group) -> str:
    plural = "" if group.count == 1 or kind == "ps" else "s"
    each = [f"{group.accelerators} GPU"] if group.accelerators else []
    each += [f"{group.cpu:g} CPU"] if group.cpu else []
    each += [f"{group.memory / GIB:.1f} GiB"] if group.memory else []
    return f"{group.count} {kind}{plural}" + (f" ({', '.join(each)})" if each else "")


def _effect(effect: Effect) -> str:
    return (
        f"{effect.throughput:,.4g} samples/s ({effect.low:,.4g} to {effect.high:,.4g} "
        f"with {effect.confidence:.0%})"
    )


def _use(use: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_amount(name, amount)}" for name, amount in sorted(use.items()))


def _amount(name: str, amount: float) -> str:
    return f"{amount / GIB:,.1f} GiB" if name == "memory" else f"{amount:,.6g}"
