"""``dlrover check``: measure this machine, or all machines of a launcher's job together."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlrover._util import decoding
from dlrover.errors import ConfigurationError, ExitCode
from dlrover.master.machine.checks import nodecheck
from dlrover.master.machine.checks.checking import trial
from dlrover.master.machine.checks.evidence import CheckEvidence, better
from dlrover.spec.check import (
    CheckFinding,
    CheckOrder,
    CheckReport,
    Component,
    FindingKind,
    ProbeResult,
    ProbeState,
)
from dlrover.spec.job import Limits
from dlrover.training.probes.process import CheckProcess

SHARE_SECONDS = 30.0
"""Seconds that ranks wait for each other beyond the time of their probes."""
RANK_VARIABLES = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}
"""Variables that a launcher sets for each rank, and Slurm's names for them."""


class LauncherPlace(msgspec.Struct, frozen=True):
    """Place of this process in a launcher's job."""

    rank: int
    size: int
    local_rank: int


class RankCheck(msgspec.Struct, frozen=True):
    """What a rank sends to the others after each round."""

    hostname: str
    report: CheckReport | None


class CheckOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the check, as ``--output json`` prints it."""

    healthy: bool
    seconds: float
    nodes: tuple[str, ...]
    """The checked machine, or the ranks of the job with their machines, by number."""
    results: dict[int, tuple[ProbeResult, ...]]
    """Results by node number."""
    findings: tuple[CheckFinding, ...]

    @property
    def exit_code(self) -> ExitCode:
        """3 if something is at fault, else 0."""
        return ExitCode.SUCCESS if self.healthy else ExitCode.INFRASTRUCTURE


def check(env: Mapping[str, str], limits: Limits, directory: str, accelerator: str) -> CheckOutcome:
    """Check this machine or, as a rank of a launcher's job, the machines of all ranks together.

    Raises:
        ConfigurationError: the launcher's variables make no sense, or ``directory`` does not exist.
        InfrastructureError: the ranks do not find each other.
    """
    place = find_place(env)
    where = directory or tempfile.gettempdir()
    if not Path(where).is_dir():
        raise ConfigurationError(f"--directory {where}: must be a directory.")
    arguments = ["--directory", where, "--accelerator", accelerator]
    if place is None:
        return asyncio.run(_alone(arguments, env, limits))
    variables = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
    }
    if int(env.get("LOCAL_WORLD_SIZE") or env.get("SLURM_NTASKS_PER_NODE") or 1) > 1:
        arguments += ["--device", str(place.local_rank)]
    process = CheckProcess([*arguments, "--meet"], {**env, **variables})
    return asyncio.run(_together(process, place, limits))


def find_place(env: Mapping[str, str]) -> LauncherPlace | None:
    """Return this process's place in a launcher's job; None outside a job or in a job of one process.

    Raises:
        ConfigurationError: a variable is missing, is no number, or the rank is out of range.
    """
    if "MASTER_ADDR" not in env:
        return None
    values = {}
    for name, slurm in RANK_VARIABLES.items():
        text = env.get(name, env.get(slurm, "0" if name == "LOCAL_RANK" else ""))
        if not text.isdecimal():
            problem = f"{name}={text}: must be a whole number" if text else f"{name} is not set"
            raise ConfigurationError(
                f"{problem}; MASTER_ADDR is set, so this is a rank of a job, and every rank needs "
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
            )
        values[name] = int(text)
    if "MASTER_PORT" not in env:
        raise ConfigurationError("MASTER_PORT is not set, though MASTER_ADDR is.")
    place = LauncherPlace(values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"])
    if place.rank >= place.size:
        raise ConfigurationError(f"RANK={place.rank}: must be less than WORLD_SIZE={place.size}.")
    return place if place.size > 1 else None


# ---- one machine


async def _alone(arguments: Sequence[str], env: Mapping[str, str], limits: Limits) -> CheckOutcome:
    """Check the machine's parts, then its own network with two processes."""
    began = time.monotonic()
    first, second = CheckProcess(arguments, env), CheckProcess(arguments, env)
    try:
        order = CheckOrder(check=1, round=1, seconds=limits.check_timeout, local=True, members=(0,))
        own = await first.probe(order, 0)
        order = CheckOrder(
            check=1,
            round=2,
            seconds=limits.check_timeout,
            local=False,
            members=(0, 1),
            store_addr="127.0.0.1",
            store_port=_free_port(),
        )
        pair = await asyncio.gather(first.probe(order, 0), second.probe(order, 1))
    finally:
        first.kill()
        second.kill()
    network = next((r for r in (*pair[0], *pair[1]) if r.state is ProbeState.FAILED), pair[0][0])
    own += (msgspec.structs.replace(network, name="this machine"),)
    found = tuple(
        CheckFinding(
            FindingKind.FAULT, (0,), r.component, f"{r.name}: {r.message}" if r.name else r.message
        )
        for r in own
        if r.state is ProbeState.FAILED
    )
    return CheckOutcome(
        healthy=not found,
        seconds=time.monotonic() - began,
        nodes=(socket.gethostname(),),
        results={0: own},
        findings=found,
    )


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


# ---- a launcher's job


async def _together(process: CheckProcess, place: LauncherPlace, limits: Limits) -> CheckOutcome:
    """Check together with the other ranks. All see the same reports and reach the same verdict."""
    began = time.monotonic()
    evidence = CheckEvidence(tuple(range(place.size)))
    groups = nodecheck.first_pairs(evidence.nodes)
    results: dict[int, tuple[ProbeResult, ...]] = {}
    names: dict[int, str] = {}
    round_, local = 0, set(evidence.nodes)
    try:
        while (groups or local) and round_ < limits.check_rounds:
            round_ += 1
            members = await _round(process, place, groups, local, round_, limits)
            reports = {}
            for rank, member in enumerate(members):
                names[rank] = member.hostname or names.get(rank, "unknown")
                reports[rank] = member.report or _silent(round_)
                own = [r for r in reports[rank].results if r.component is not Component.NETWORK]
                evidence.local[rank] = better(evidence.local.get(rank, ()), own)
                results[rank] = better(results.get(rank, ()), reports[rank].results)
            evidence.trials += [
                trial((group[0], group[1]), reports[group[0]], reports[group[1]])
                for group in groups
                if len(group) > 1
            ]
            ratio = limits.straggler_ratio
            groups = nodecheck.next_pairs(evidence, ratio)
            local = nodecheck.slow_parts(evidence, ratio) if round_ == 1 else set()
    finally:
        process.kill()
    found = tuple(nodecheck.findings(evidence, limits.straggler_ratio))
    return CheckOutcome(
        healthy=not nodecheck.left_out(found, stragglers=False),
        seconds=time.monotonic() - began,
        nodes=tuple(f"rank {rank} ({names[rank]})" for rank in evidence.nodes),
        results=results,
        findings=found,
    )


async def _round(
    process: CheckProcess,
    place: LauncherPlace,
    groups: Sequence[tuple[int, ...]],
    local: Collection[int],
    round_: int,
    limits: Limits,
) -> list[RankCheck]:
    mine = next((group for group in groups if place.rank in group), (place.rank,))
    report = CheckReport(check=1, round=round_, results=())
    if len(mine) > 1 or place.rank in local:
        order = CheckOrder(
            check=1,
            round=round_,
            seconds=limits.check_timeout,
            local=place.rank in local,
            members=mine,
        )
        results = await process.probe(order, place.rank)
        report = CheckReport(check=1, round=round_, results=results).bounded()
    value = msgspec.json.encode(RankCheck(socket.gethostname(), report)).decode()
    seconds = limits.check_timeout + SHARE_SECONDS
    values = await process.share(f"round {round_}", value, seconds)
    return [_member(text) for text in values]


def _member(text: str) -> RankCheck:
    return decoding.json(text, RankCheck) if text else RankCheck("", None)


def _silent(round_: int) -> CheckReport:
    silent = ProbeResult(
        component=Component.AGENT, state=ProbeState.FAILED, message="it did not answer"
    )
    return CheckReport(check=1, round=round_, results=(silent,))


# ---- showing

_STYLES = {ProbeState.OK: "green", ProbeState.FAILED: "bold red", ProbeState.SKIPPED: "yellow"}


def render(report: CheckOutcome, console: Console) -> None:
    """Print a line for each probe."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("node", "component", "figure", "verdict"):
        table.add_column(title, justify="right" if title == "figure" else "left")
    for node, name in enumerate(report.nodes):
        for result in report.results.get(node, ()):
            component = f"{result.component.value} {result.name}".strip()
            verdict = result.state.value + (f": {result.message}" if result.message else "")
            figure = f"{result.figure:,.4g} {result.unit}" if result.figure else "-"
            table.add_row(name, component, figure, Text(verdict, style=_STYLES[result.state]))
    console.print(table)


def verdict(report: CheckOutcome) -> list[str]:
    """Return the findings in words, the worst last, then a sentence if nothing is at fault."""
    order = (
        FindingKind.NOTE,
        FindingKind.UNTESTED,
        FindingKind.SLOW,
        FindingKind.LINK,
        FindingKind.UNDETERMINED,
        FindingKind.FAULT,
    )
    lines = []
    for finding in sorted(report.findings, key=lambda f: order.index(f.kind)):
        names = ", ".join(report.nodes[node] for node in finding.nodes)
        lines.append(f"{finding.kind.value}: {names}: {finding.component.value}: {finding.message}")
    if report.healthy and len(report.nodes) == 1:
        lines.append(f"This machine is healthy; the check took {report.seconds:.1f} s.")
    elif report.healthy:
        lines.append(f"No node is at fault of the {len(report.nodes)} that were checked.")
    return lines
