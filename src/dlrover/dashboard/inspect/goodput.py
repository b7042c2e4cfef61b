"""``dlrover goodput``: replay a job's journal and report where its time went."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlrover.dashboard.inspect.plans import PlanHistory, records
from dlrover.dashboard.inspect.queries import ask
from dlrover.dashboard.inspect.timeline import Timeline
from dlrover.data.machine.queue import ShardQueue
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.master.files import load_config
from dlrover.master.journal.journal import open_journal
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.job import JobMachine
from dlrover.master.shards import ShardsService
from dlrover.master.views.status import status_of
from dlrover.rpc.messages import Status
from dlrover.spec import events
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import CAUSES, Cause, Goodput, IncidentCost
from dlrover.spec.requests.shards import ShardRequest
from dlrover.spec.words import counted

HOURS_FROM = 36_000.0
"""Wall seconds, summed over all nodes, from which times are shown in hours."""


@dataclass(frozen=True, kw_only=True)
class GoodputReport:
    """A job's goodput, with a timeline of its nodes."""

    job: str
    job_dir: str
    phase: str
    submitted_at: float
    """Seconds since the epoch."""
    goodput: Goodput
    timeline: Timeline
    hostnames: dict[int, str]
    plans: tuple[PlanHistory, ...] = ()
    """Plans of the auto-scaler."""
    happened: tuple[tuple[float, events.EventBody], ...] = ()
    """Events with their times."""
    datasets: dict[str, ShardQueue]
    """Datasets that the job's master deals, by name."""
    status: Status
    """Status at the journal's end."""

    @property
    def sizes(self) -> tuple[tuple[float, int], ...]:
        """Time at which each world was formed, and its number of nodes."""
        formed = ((at, b) for at, b in self.happened if isinstance(b, events.RoundCompleted))
        return tuple((at, body.nodes) for at, body in formed)

    def content(self) -> dict[str, Any]:
        """Return the report's content for JSON."""
        head = {"job": self.job, "job_dir": self.job_dir, "phase": self.phase}
        return head | dict(msgspec.to_builtins(self.goodput))


def report(job_dir: JobDir) -> GoodputReport:
    """Return the goodput of the job in ``job_dir`` until now, or until its end.

    Raises:
        ConfigurationError: the job's journal is not on this machine.
        InfrastructureError: the journal cannot be read.
    """
    if not job_dir.journal.exists():
        raise ConfigurationError(
            f"{job_dir.path} holds no journal; it is on the machine that runs the job's master."
        )
    machine, timeline = JobMachine(), Timeline()
    ledger, shards = Ledger(timeline), ShardsService(_unrecorded, quiet=True)
    last = 0.0
    happened: list[tuple[float, events.EventBody]] = []
    url = load_config(job_dir).journal if job_dir.job.exists() else "file:"
    with contextlib.closing(open_journal(url, job_dir.journal, read_only=True)) as journal:
        for last, entry in journal.entries():
            if isinstance(entry, inputs.Input):
                commands = machine.handle(entry, last)
                happened += [(last, c.body) for c in commands if isinstance(c, inputs.Emit)]
                ledger.handle(entry, last, machine)
                shards.note(entry, last)
            elif isinstance(entry, ShardRequest):
                shards.handle(entry, last)
    until = last if machine.outcome is not None else max(last, _now(job_dir, machine))
    goodput = ledger.goodput(until)
    ledger.finish(until)
    return GoodputReport(
        job=machine.job.name,
        job_dir=str(job_dir.path),
        phase=machine.state.phase.value,
        submitted_at=machine.state.submitted_at,
        goodput=goodput,
        timeline=timeline,
        hostnames={node.id: node.hostname for node in machine.nodes.values()},
        plans=records(happened),
        happened=tuple(happened),
        datasets=shards.shards.queues,
        status=status_of(machine, until, {}),
    )


def _unrecorded(body: events.EventBody, at: float) -> events.Event:
    return events.Event(1, at, body)


def _now(job_dir: JobDir, machine: JobMachine) -> float:
    """Return the time on the clock of the job's master; 0.0 if no master answers."""
    try:
        status = asyncio.run(ask(job_dir, lambda master: master.status()))
    except (InfrastructureError, ConfigurationError):
        return 0.0
    return machine.state.submitted_at + status.seconds


# ---- text


def render(found: GoodputReport, console: Console) -> None:
    """Print a report as text."""
    goodput = found.goodput
    amount = Amounts(goodput.wall_seconds)
    rest = f": {found.phase}, {amount(goodput.job_seconds)}, {counted(goodput.nodes, 'node')}"
    console.print(Text.assemble((found.job, "bold"), rest))
    console.print(summary(found.goodput), highlight=False, soft_wrap=True)
    console.print()
    console.print(_causes(goodput, amount))
    if goodput.incidents:
        console.print()
        console.print(_incidents(goodput, amount))
    for note in notes(goodput, amount):
        console.print(note, highlight=False, soft_wrap=True)


def summary(goodput: Goodput) -> str:
    """Return the goodput in one sentence."""
    amount = Amounts(goodput.wall_seconds)
    productive = goodput.seconds.get(Cause.PRODUCTIVE.value, 0.0)
    if goodput.goodput_ratio is None:
        return "Goodput is not measured: the program has reported no training step."
    return (
        f"Goodput {goodput.in_words()}: of {amount(goodput.wall_seconds)} of all nodes, "
        f"{amount(productive)} went into new steps."
    )


def _causes(goodput: Goodput, amount: Amounts) -> Table:
    table = Table("cause", box=None)
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for cause, seconds in spent(goodput):
        table.add_row(cause.label, amount(seconds), percent(seconds / goodput.wall_seconds))
    table.add_row("all", amount(goodput.wall_seconds), percent(1.0))
    return table


def _incidents(goodput: Goodput, amount: Amounts) -> Table:
    table = Table("incident", box=None)
    for name in ("lasted", "cost", "steps lost"):
        table.add_column(name, justify="right")
    table.add_column("what happened", overflow="fold")
    for incident in goodput.incidents:
        table.add_row(
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.since)),
            f"{incident.until - incident.since:.1f} s",
            amount(incident.lost),
            steps_lost(incident),
            incident.title,
        )
    return table


def notes(goodput: Goodput, amount: Amounts) -> list[str]:
    """Return sentences about what the tables leave out."""
    found = []
    if goodput.earlier_incidents:
        cost = amount(goodput.earlier_incident_seconds)
        found.append(f"{goodput.earlier_incidents} earlier incidents cost {cost} in all.")
    if goodput.degraded_seconds:
        short = amount(goodput.degraded_seconds)
        found.append(f"For {short} the job trained with fewer nodes than it wants.")
    if goodput.rounds_without_first_step:
        found.append(
            "Recomputed steps are not measured: the program did not report with which step it began in "
            f"{goodput.rounds_without_first_step} of the later rounds."
        )
    return found


def spent(goodput: Goodput) -> list[tuple[Cause, float]]:
    """Return the causes that took time, with their seconds."""
    return [(c, seconds) for c in CAUSES if (seconds := goodput.seconds[c.value])]


def steps_lost(incident: IncidentCost) -> str:
    """Return the steps that an incident undid, as a table cell; ``-`` if unknown."""
    return str(incident.steps_lost) if incident.steps_lost >= 0 else "-"


def percent(ratio: float) -> str:
    """Return a share as text: ``93.1 %``."""
    return f"{100 * ratio:.1f} %"


class Amounts:
    """Formatter of node times, in the unit that fits the job's wall seconds."""

    def __init__(self, wall_seconds: float) -> None:
        self._hours = wall_seconds >= HOURS_FROM

    def __call__(self, seconds: float) -> str:
        """Return ``12.3 s`` or ``1.2 h``."""
        return f"{seconds / 3600:,.2f} h" if self._hours else f"{seconds:,.1f} s"
