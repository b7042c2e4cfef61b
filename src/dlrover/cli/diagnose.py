"""``dlrover diagnose``: the verdict on a log, or on the failures of a job that DLRover ran."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dlrover.agent.facts import tells
from dlrover.errors import ConfigurationError
from dlrover.master import diagnosis, history
from dlrover.spec.events import WorkerFailed
from dlrover.spec.failure import Failure, FailureKind, Verdict
from dlrover.spec.jobdir import JobDir, MasterConfig
from dlrover.spec.rules import Rule

LOG_BYTES = 1024 * 1024
"""The end of a log that is looked at."""

_VAGUE = frozenset({"exception", "exit", "signal", "aborted", "killed", "segfault", "node_lost"})
"""Causes that only repeat how something ended."""

_ERROR = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?P<type>[\w.]*(?:Error|Exception|Interrupt|gaierror)):? ?(?P<message>.*)$",
    re.MULTILINE,
)
_SIGNAL = re.compile(
    r"\bSignal \d+ \((SIG\w+)\)|<Signals\.(SIG\w+): \d+>|exitcode\s*: -(\d+)"
    r"|^(?:.*: )?(Segmentation fault|Killed|Bus error|Illegal instruction|Aborted)(?: \(core dumped\))?$",
    re.MULTILINE,
)
_KILL = re.compile(r"oom-kill:|\bkilled process \d+", re.IGNORECASE)
_WORDS = {
    "Segmentation fault": signal.SIGSEGV,
    "Killed": signal.SIGKILL,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Aborted": signal.SIGABRT,
}


class Finding(msgspec.Struct, frozen=True):
    """What is said about one failure."""

    source: str
    """The file, or the round and the log of a job's worker."""
    verdict: Verdict


def of_log(path: str, own: tuple[Rule, ...]) -> Finding:
    """The verdict on the end of a log; of standard input if ``path`` is empty or ``-``.

    Raises:
        ConfigurationError: the log cannot be read, or is empty.
    """
    source, text = _read(path)
    if not text.strip():
        raise ConfigurationError(f"{source} is empty; diagnose takes what a program printed.")
    readings = list(_readings(text))
    verdicts = [diagnosis.diagnose(failure, own) for failure in readings]
    told = [v for v in verdicts if v.cause not in _VAGUE]
    signalled = verdicts[:1] if readings[0].kind is FailureKind.SIGNAL else []
    raised = [v for v in verdicts if v.cause == "exception"]
    chosen = [*told, *signalled, *raised, *verdicts][0]
    title = chosen.title.replace("rank -1 ", "The program ").replace(" on node -1", "")
    title = title.replace("node -1 ", "The node ")
    return Finding(source, msgspec.structs.replace(chosen, title=title))


def of_job(job_dir: JobDir, own: tuple[Rule, ...]) -> tuple[Finding, ...]:
    """The verdict on the root cause of each round of a job in which workers failed.

    The rows that the job began with are used if ``own`` is empty.

    Raises:
        ConfigurationError: the job's files cannot be read.
    """
    try:
        bodies = [event.body for event in history.read(job_dir.events)]
        config = msgspec.json.decode(job_dir.job.read_bytes(), type=MasterConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"--job-dir {job_dir.path} does not tell what failed: {error}."
        ) from error
    rows = own or config.job.diagnosis_rules
    rounds: dict[int, list[Failure]] = {}
    for body in bodies:
        if isinstance(body, WorkerFailed):
            rounds.setdefault(body.failure.round, []).append(body.failure)
    roots = {number: diagnosis.root_cause(failed, rows) for number, failed in rounds.items()}
    return tuple(
        Finding(f"round {number}, {root.log_path}", diagnosis.diagnose(root, rows))
        for number, root in roots.items()
    )


def render(finding: Finding) -> str:
    """A finding in words, on a few lines."""
    verdict = finding.verdict
    lines = {
        "Cause": verdict.cause,
        "Fault": verdict.origin.value,
        "Evidence": verdict.evidence.replace("\n", "\n          "),
        "Action": verdict.action.value,
        "Next": verdict.advice,
        "Log": finding.source,
    }
    labelled = [f"{label + ':':<9} {text}" for label, text in lines.items() if text]
    return "\n".join([verdict.title, *labelled])


def _read(path: str) -> tuple[str, str]:
    if path in ("", "-"):
        return "standard input", sys.stdin.read()
    try:
        return path, Path(path).read_bytes()[-LOG_BYTES:].decode(errors="replace")
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}; diagnose takes a log file."
        ) from error


def _readings(text: str) -> Iterator[Failure]:
    """The records that a log may stand for, the likeliest first."""
    base = Failure(
        id="log",
        kind=FailureKind.EXIT,
        node_id=-1,
        rank=-1,
        local_rank=-1,
        round=0,
        exit_code=1,
        stderr_tail=text,
        node_facts=tuple(line for line in text.splitlines() if tells(line)),
    )
    numbers = [_number(found) for found in _SIGNAL.finditer(text)]
    if not numbers and _KILL.search(text):
        numbers = [signal.SIGKILL]
    if numbers:
        yield _changed(base, kind=FailureKind.SIGNAL, signal=numbers[-1], exit_code=None)
    yield base
    errors = list(_ERROR.finditer(text))
    if errors:
        last = errors[-1]
        yield _changed(
            base, kind=FailureKind.EXCEPTION, exception=last["type"], message=last["message"]
        )
    yield _changed(base, kind=FailureKind.NODE, message=text)


def _changed(failure: Failure, **facts: object) -> Failure:
    return msgspec.structs.replace(failure, **facts)


def _number(found: re.Match[str]) -> int:
    name, other_name, code, word = found.groups()
    if code:
        return int(code)
    if word:
        return int(_WORDS[word])
    return int(getattr(signal, name or other_name, 0))
