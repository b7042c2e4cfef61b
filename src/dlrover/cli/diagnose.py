"""``dlrover diagnose``: the verdict on a log, or on the failures of a job that DLRover ran."""

from __future__ import annotations

import re
import sys
from operator import itemgetter
from pathlib import Path

import msgspec

from dlrover.errors import ConfigurationError, kind_of, readable
from dlrover.master import diagnosis_rules
from dlrover.master.journal import history
from dlrover.master.machine.diagnosis.diagnosis import hang_verdict, root_cause
from dlrover.master.machine.diagnosis.log import plain
from dlrover.spec.events import HangFound, WorkerFailed
from dlrover.spec.failure import Origin, Rule, Verdict
from dlrover.spec.jobdir import JobDir, MasterConfig, decode

LOG_BYTES = 256 * 1024
"""Bytes at the end of a log that are examined."""
_ORIGIN = "|".join(re.escape(origin.value) for origin in Origin)
_LAST_SCREEN = re.compile(
    rf"""^(?P<title>.+)\n
         Fault:[ ]+(?P<origin>{_ORIGIN})\n
         (?:Evidence:[ ](?P<evidence>.+)\n)?
         (?:(?!Fault:[ ]+(?:{_ORIGIN})\n).*\n)*?
         Ended:[ ].*\n
         (?:(?:Data|Goodput):[ ].*\n)*
         (?:Next:[ ]+(?P<advice>.+)\n)?
         Job:[ ]""",
    re.VERBOSE | re.MULTILINE,
)
"""The verdict in the output of ``dlrover-run`` (`dlrover.cli.run.report`)."""


class LogVerdict(msgspec.Struct, frozen=True):
    """The verdict on one failure."""

    source: str
    """The file, or the round and log of a job's worker."""
    verdict: Verdict


def of_log(path: str, own: tuple[Rule, ...]) -> LogVerdict:
    """Return the verdict on the end of a log; on standard input if ``path`` is empty or ``-``.

    Raises:
        ConfigurationError: the log cannot be read, is empty, or nothing was given but a terminal.
    """
    source, text = _read(path)
    if not text.strip():
        raise ConfigurationError(f"{source} is empty; diagnose takes what a program printed.")
    if not own and (screens := list(_LAST_SCREEN.finditer(plain(text)))):
        return LogVerdict(source, _shown(screens[-1]))
    chosen = diagnosis_rules.table(own).diagnose_log(text)
    title = chosen.title.replace("rank -1 ", "The program ").replace(" on node -1", "")
    title = title.replace("left with exit code -1: a program that it ran ", "")
    title = title.replace("left with exit code -1", "left no error that is known")
    return LogVerdict(source, msgspec.structs.replace(chosen, title=title))


def _shown(screen: re.Match[str]) -> Verdict:
    """Return the verdict of a last screen, which names no cause: it knows more than the lines above it tell."""
    return Verdict(
        title=screen["title"],
        origin=Origin(screen["origin"]),
        evidence=screen["evidence"] or "",
        advice=screen["advice"] or "",
    )


def of_job(job_dir: JobDir, own: tuple[Rule, ...]) -> tuple[LogVerdict, ...]:
    """Return the verdict on the root cause of each round in which workers of a job failed or hung.

    If ``own`` is empty, the rules that the job started with apply.

    Raises:
        ConfigurationError: the job's files cannot be read.
    """
    try:
        bodies = [event.body for event in history.read(job_dir.events)]
        config = decode(job_dir.job, job_dir.job.read_bytes(), MasterConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise kind_of(error)(
            f"--job-dir {job_dir.path} has no readable record of failures: {error}."
        ) from error
    table = diagnosis_rules.table(own or config.job.diagnosis_rules)
    rounds: dict[int, list[WorkerFailed]] = {}
    for body in bodies:
        if isinstance(body, WorkerFailed):
            rounds.setdefault(body.failure.round, []).append(table.failed(body.failure))
    roots = {number: root_cause(failed) for number, failed in rounds.items()}
    found = [(n, root.failure.log_path, root.verdict) for n, root in roots.items()]
    found += [(b.round, b.evidence, hang_verdict(b)) for b in bodies if isinstance(b, HangFound)]
    return tuple(
        LogVerdict(f"round {number}, {source}", verdict)
        for number, source, verdict in sorted(found, key=itemgetter(0))
    )


def render(finding: LogVerdict) -> str:
    """Return a finding in words, on a few lines."""
    verdict = finding.verdict
    lines = {
        "Cause": verdict.cause,
        "Fault": verdict.origin.value,
        "Evidence": verdict.evidence.replace("\n", "\n          "),
        "Action": verdict.action.value if verdict.cause else "",
        "Next": verdict.advice,
        "Log": finding.source,
    }
    labelled = [f"{label + ':':<9} {text}" for label, text in lines.items() if text]
    return "\n".join([verdict.title, *labelled])


def _read(path: str) -> tuple[str, str]:
    if not path and sys.stdin.isatty():
        raise ConfigurationError(
            "diagnose takes a log file, --job-dir DIR, or a log on its standard input (- for one that is typed)."
        )
    if path in ("", "-"):
        path, data = "standard input", sys.stdin.buffer.read()
    else:
        with readable(path, "; diagnose takes a log file"):
            data = Path(path).read_bytes()
    return path, data[-LOG_BYTES:].decode(errors="replace")
