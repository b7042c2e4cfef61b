"""``dlrover status``, ``nodes``, ``stacks``, ``events``, ``scale`` and ``stop``: ask the master, or read its files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlrover.errors import ConfigurationError, ExitCode, InfrastructureError
from dlrover.master.files import load_config, read_outcome
from dlrover.master.journal import history
from dlrover.rpc import messages
from dlrover.rpc.client import MasterClient, connect
from dlrover.spec.events import Event
from dlrover.spec.jobdir import JobDir
from dlrover.spec.node import WORKER
from dlrover.spec.words import counted, size

Reply = TypeVar("Reply")

RESTART_TIME = 10.0
"""Seconds in which a master that was killed is back, as a rule."""


class StatusReport(msgspec.Struct, frozen=True):
    """A job's status and its source."""

    job_dir: str
    master_running: bool
    """True if the master answered; False if the status is from its journal."""
    status: messages.Status


def status(job_dir: JobDir) -> StatusReport:
    """Return the status of the job in ``job_dir``.

    Raises:
        ConfigurationError: the directory has neither a master's address nor a journal.
        InfrastructureError: the master does not answer, and its journal cannot be read.
    """
    try:
        return StatusReport(
            str(job_dir.path), True, asyncio.run(ask(job_dir, lambda master: master.status()))
        )
    except (InfrastructureError, ConfigurationError) as silent:
        try:
            return StatusReport(str(job_dir.path), False, _from_journal(job_dir))
        except (InfrastructureError, ConfigurationError) as error:
            if isinstance(error, InfrastructureError) and job_dir.journal.exists():
                raise InfrastructureError(f"{silent} {error}") from error
            raise silent from error


async def ask(job_dir: JobDir, question: Callable[[MasterClient], Awaitable[Reply]]) -> Reply:
    """Return the answer of a job's master."""
    async with connect(job_dir) as master:
        return await question(master)


def _from_journal(job_dir: JobDir) -> messages.Status:
    from dlrover.master.journal.journal import open_journal  # noqa: PLC0415 - slow to import
    from dlrover.master.machine import inputs  # noqa: PLC0415
    from dlrover.master.machine.job import JobMachine  # noqa: PLC0415
    from dlrover.master.views.status import status_of  # noqa: PLC0415

    machine = JobMachine()
    last = 0.0
    journal = open_journal(load_config(job_dir).journal, job_dir.journal, read_only=True)
    for last, entry in journal.entries():
        if isinstance(entry, inputs.Input):
            machine.handle(entry, last)
    # The journal's end may be missing if the disk was full.
    machine.state.outcome = machine.outcome or read_outcome(job_dir.outcome)
    return status_of(machine, last, {})


def named_nodes(nodes: Sequence[messages.NodeState]) -> list[dict[str, Any]]:
    """Return nodes with the names of their fields."""
    return list(map(msgspec.structs.asdict, nodes))


def named_status(report: StatusReport) -> dict[str, Any]:
    """Return a status with the names of all fields."""
    plain: dict[str, Any] = msgspec.to_builtins(report)
    plain["status"]["nodes"] = named_nodes(report.status.nodes)
    return plain


def render_status(report: StatusReport, console: Console) -> None:
    """Print a job's status as text."""
    status = report.status
    console.print(Text.assemble((status.name, "bold"), f": {status.phase}"))
    if not report.master_running and status.outcome is None:
        console.print("The master does not answer; this is where its journal ends.")
    if status.outcome is not None:
        console.print(f"Exit code {status.outcome.exit_code}: {status.outcome.reason}")
    if status.waiting_for:
        console.print(status.waiting_for)
    last = "last round" if status.outcome is not None else "round"
    restarts = counted(status.restarts, "restart")
    number = f"at step {status.step}, " if status.step >= 0 else ""
    console.print(
        f"{last} {status.round}: {status.processes()}; {restarts}; {number}"
        f"{counted(status.steps, 'step')} in this round, {status.total_steps} in all; {status.seconds:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    if status.size:
        console.print(status.size, highlight=False, soft_wrap=True)
    for sentence in status.slow:
        console.print(sentence, highlight=False)
    roles = any(node.role for node in status.nodes)
    first = ("node", "role") if roles else ("node",)
    table = Table(*first, "rank", "status", "doing", "steps", "host", "connected", box=None)
    for node in status.nodes:
        rank = str(node.node_rank) if node.node_rank >= 0 else "-"
        connected = "yes" if node.connected else "no"
        table.add_row(
            *(str(node.id), node.role)[: len(first)],
            rank,
            node.status,
            node.doing or "-",
            str(node.steps),
            node.hostname,
            connected,
        )
    console.print(table)
    console.print(f"Job directory: {report.job_dir}", highlight=False, soft_wrap=True)


def render_nodes(nodes: Sequence[messages.NodeState], console: Console) -> None:
    """Print a job's nodes as a table."""
    table = Table("node", "rank", "status", "host", "memory", "cores", "accelerators", box=None)
    for node in nodes:
        table.add_row(
            str(node.id),
            str(node.node_rank) if node.node_rank >= 0 else "-",
            node.status,
            node.hostname or "-",
            _of(size(node.memory), size(node.memory_limit)) if node.memory_limit else "-",
            _of(f"{node.cpu:.2f}", f"{node.cores:g}") if node.cores else "-",
            f"{node.busy:.0%} busy" if node.busy >= 0 else "-",
        )
    console.print(table)


def _of(used: str, limit: str) -> str:
    return f"{used} of {limit}"


def stacks(job_dir: JobDir) -> messages.Stacks:
    """Return where every rank of a job is now.

    Raises:
        ConfigurationError: the job has ended.
        InfrastructureError: the master cannot be reached.
    """
    return _answer(job_dir, lambda master: master.stacks())


def events(job_dir: JobDir) -> list[Event]:
    """Return the events of a job so far.

    Raises:
        ConfigurationError: the job has no events on this machine, or they are damaged.
    """
    if not job_dir.events.exists():
        raise ConfigurationError(
            f"{job_dir.path} holds no events; they are on the machine that runs the job's master."
        )
    try:
        return history.read(job_dir.events)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{job_dir.events} is damaged: {error}.") from error


async def follow(job_dir: JobDir, show: Callable[[Event], None]) -> None:
    """Show all events of a job, past and new, until its master exits.

    Raises:
        InfrastructureError: the master cannot be reached at all.
    """
    seen = 0
    async with connect(job_dir) as client:
        try:
            async for notice in client.watch(follow=True):
                for event in notice.events:
                    show(event)
                seen += len(notice.events)
        except InfrastructureError:
            if seen == 0:
                raise
    for event in events(job_dir)[seen:]:
        show(event)  # events written while the connection closed


def line(event: Event) -> str:
    """Return an event as one line of text."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(event.time))}  {event.sentence()}"


def scale(job_dir: JobDir, nodes: int, reason: str, role: str = WORKER) -> str:
    """Ask a job's master for another number of nodes of a role; return its answer, one sentence.

    Raises:
        ConfigurationError: the job cannot have that many, or has ended.
        InfrastructureError: the master cannot be reached.
    """
    return _granted(job_dir, lambda master: master.scale(nodes, reason, role))


def drain(job_dir: JobDir, node: int, reason: str) -> str:
    """Ask a job's master for another node in the place of one; return its answer, one sentence.

    Raises:
        ConfigurationError: the node cannot be replaced now, or the job has ended.
        InfrastructureError: the master cannot be reached.
    """
    return _granted(job_dir, lambda master: master.drain(node, reason))


def save(job_dir: JobDir, reason: str) -> str:
    """Ask a job's master to have the newest memory checkpoint stored; return its answer.

    Raises:
        ConfigurationError: nothing can be stored now, or the job has ended.
        InfrastructureError: the master cannot be reached.
    """
    return _granted(job_dir, lambda master: master.save(reason))


def stop(job_dir: JobDir, reason: str) -> None:
    """Ask a job's master to end the job; its nodes stop their workers.

    Raises:
        ConfigurationError: the job has ended.
        InfrastructureError: the master cannot be reached.
    """
    _answer(job_dir, lambda master: master.stop(reason, ExitCode.STOPPED))


def _granted(
    job_dir: JobDir, question: Callable[[MasterClient], Awaitable[messages.ScaleReply]]
) -> str:
    reply = _answer(job_dir, question)
    if reply.refused:
        raise ConfigurationError(reply.sentence)
    return reply.sentence


def _answer(job_dir: JobDir, question: Callable[[MasterClient], Awaitable[Reply]]) -> Reply:
    return asyncio.run(answer(job_dir, question))


async def answer(job_dir: JobDir, question: Callable[[MasterClient], Awaitable[Reply]]) -> Reply:
    """Return the answer of a running job's master; wait for a master that is being restarted.

    Raises:
        ConfigurationError: the job has ended.
        InfrastructureError: its master does not answer.
    """
    late = time.monotonic() + RESTART_TIME
    while True:
        try:
            return await ask(job_dir, question)
        except InfrastructureError as error:  # noqa: PERF203 - that is what the loop is for
            outcome = read_outcome(job_dir.outcome)
            if outcome is not None:
                reason = f"The job in {job_dir.path} has ended: {outcome.reason}"
                raise ConfigurationError(reason) from error
            if time.monotonic() > late:
                raise
            await asyncio.sleep(0.5)
