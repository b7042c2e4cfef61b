"""From a worker's failure to a verdict: what happened, whose fault it is, what to do next.

Pure: it reads nothing but the failure records. What failures look like is said in
`dlrover.master.diagnosis_rules`; this module reads the facts out of a record (frames of the traceback,
the interpreter's last words), finds the row that fits, and words the verdict.
"""

from __future__ import annotations

import functools
import re
import signal
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from dlrover.master.diagnosis_rules import RULES, Rule
from dlrover.spec.failure import Failure, FailureKind, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

ECHO_WINDOW = 10.0
"""Seconds by which a failure may be seen later than its echo and still be the root cause.

A dying process closes its connections first, so that its peers fail within milliseconds; it is seen to
have ended only when its exit handlers, its core dump and the release of its device are done.
"""

OTHERS_SHOWN = 8
"""Failed ranks named beside the root cause; of the rest only their number is told."""

_NAMED_SIGNALS = frozenset(signal.Signals)

_TITLE_LIMIT = 120
"""Characters of an exception's message that a title shows."""
_LINE_LIMIT = 240
"""Characters of a message or source line that the evidence shows."""


def diagnose(failure: Failure) -> Verdict:
    """The verdict on one failure."""
    facts = _read(failure)
    rule = _rule_of(facts)
    fields = {
        "error": facts.error,
        "code": failure.exit_code,
        "signal": f"{_signal_name(facts.code)} (signal {facts.code})",
        "place": facts.place,
    }
    fields["subject"] = _subject(rule, facts) or rule.otherwise.format(**fields)
    return Verdict(
        title=_title(failure, facts, rule.title.format(**fields)),
        origin=rule.origin,
        hopeless=rule.hopeless,
        evidence=_evidence(facts, rule),
        advice=rule.advice.format(**fields),
        signature=_signature(failure, facts, rule),
    )


def is_echo(failure: Failure) -> bool:
    """Whether ``failure`` may only follow from the end of a peer, or from being told to stop."""
    return _rule_of(_read(failure)).echo


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that came first, unless it echoes another one of its round.

    Reports arrive in any order and echoes are often seen before their cause, so the earliest failure
    that is no echo wins when it ended within `ECHO_WINDOW` of the first.

    Raises:
        ValueError: ``failures`` is empty.
    """
    if not failures:
        raise ValueError("root_cause needs at least one failure, got none.")
    ordered = sorted(failures, key=_when)
    first = ordered[0]
    near = (f for f in ordered if f.round == first.round and f.time <= first.time + ECHO_WINDOW)
    return next((f for f in near if not is_echo(f)), first)


def other_failures(failures: Sequence[Failure], root: Failure | None) -> tuple[str, ...]:
    """One line for each failed rank but ``root``, first ones first; at most `OTHERS_SHOWN` and a count."""
    others = [f for f in sorted(failures, key=_when) if root is None or f.id != root.id]
    lines = [diagnose(f).title for f in others[:OTHERS_SHOWN]]
    if len(others) > OTHERS_SHOWN:
        lines.append(f"and {len(others) - OTHERS_SHOWN} more")
    return tuple(lines)


def is_user_file(path: str) -> bool:
    """Whether a traceback's file belongs to the user: no library, interpreter or launcher file."""
    return _FOREIGN_FILE.search(path) is None


# ---- facts

_UNCAUGHT_EXCEPTION = 1
"""The interpreter's exit code after it printed a traceback."""

_HEADER = "Traceback (most recent call last):"
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
_FOREIGN_FILE = re.compile(
    r"""^<                                    # <frozen runpy>, <string>
      | /(site|dist)-packages/
      | /lib(64)?/(python|pypy)\d[^/]*/       # the standard library
      | /python\d+\.zip/
      | \.pyx$
      | /dlrover/(agent|checkpoint|elastic|sharding)/
    """,
    re.VERBOSE,
)
_FRAME = re.compile(
    r"""^[ \t|+-]* File\ "(?P<file>[^"\n]+)",\ line\ (?P<line>\d+)
        (?:,?\ in\ (?P<function>[^\n]+))?
        (?:\n[ \t|]+(?!File\ ")(?P<source>[^\s|][^\n]*))?""",
    re.VERBOSE | re.MULTILINE,
)
_ERROR_LINE = re.compile(r"^(?P<error>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.MULTILINE)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_NOT_FATAL = re.compile(r"Exception (ignored|in thread)[^\n]*\n\Z")
# What faulthandler writes while the process dies, most recent call first.
_DUMP = re.compile(
    r"^Current thread 0x[^\n]*\(most recent call first\):\n(?P<frames>(?:[ \t]+File [^\n]*(?:\n|\Z))+)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class _Frame:
    """One call on a stack."""

    file: str
    line: int
    function: str
    source: str

    def __str__(self) -> str:
        parts = [f"{self.file}:{self.line}"]
        if self.function:
            parts.append(f"in {self.function}")
        if self.source:
            parts.append(_one_line(self.source))
        return ": ".join(parts)

    @property
    def name(self) -> str:
        """The file without its folders, which differ between nodes and runs."""
        return PurePosixPath(self.file).name


@dataclass(frozen=True)
class _Facts:
    """What a failure record says, read out once."""

    kind: FailureKind
    #: exit code or signal number
    code: int
    #: the exception's type without its module
    error: str
    #: the first line that says something
    message: str
    #: what a rule's ``text`` is searched in
    text: str
    stderr: str
    #: innermost last
    frames: tuple[_Frame, ...]
    oom_killed: bool
    steps: int

    @property
    def frame(self) -> _Frame | None:
        """The innermost frame of the user's own code, else the innermost of all."""
        innermost_first = self.frames[::-1]
        own = (f for f in innermost_first if is_user_file(f.file))
        return next(own, innermost_first[0] if innermost_first else None)

    @property
    def place(self) -> str:
        """``train.py:12`` of `frame`."""
        frame = self.frame
        return f"{frame.name}:{frame.line}" if frame else "the place that its log shows"


def _read(failure: Failure) -> _Facts:
    facts = _Facts(
        kind=failure.kind,
        code=failure.exit_code or 0,
        error=_one_line(failure.exception.rpartition(".")[2]),
        message=next((line.strip() for line in failure.message.splitlines() if line.strip()), ""),
        text=failure.stderr_tail,
        stderr=failure.stderr_tail,
        frames=(),
        oom_killed=failure.oom_killed,
        steps=failure.steps,
    )
    if failure.kind is FailureKind.EXCEPTION:
        return _read_exception(facts, failure)
    if failure.kind is FailureKind.SPAWN:
        return replace(facts, text=failure.message)
    if failure.kind is FailureKind.SIGNAL:
        return replace(facts, code=failure.signal or 0, frames=_dumped_frames(failure.stderr_tail))
    return _read_exit(facts)


def _read_exception(facts: _Facts, failure: Failure) -> _Facts:
    """Look behind an exception: at what it was raised from, and at what it carries."""
    chain = failure.traceback.rpartition(_CONTEXT)[2]
    facts = replace(
        facts,
        text=f"{failure.message}\n{_messages(chain)}",
        frames=_frames(chain.rpartition(_CAUSE)[2].rpartition(_HEADER)[2]),
    )
    # An exception that a library carried over from another process has that process's traceback in its
    # message; what was raised there says more than how it got here.
    return _with_chain(facts, failure.message.rpartition(_HEADER)[2]) or facts


def _read_exit(facts: _Facts) -> _Facts:
    """Look behind an exit code: programs that are run by others pass on how those ended."""
    if facts.code - 128 in _NAMED_SIGNALS:
        frames = _dumped_frames(facts.stderr)
        return replace(facts, kind=FailureKind.SIGNAL, code=facts.code - 128, frames=frames)
    if facts.code != _UNCAUGHT_EXCEPTION:
        return facts
    return _with_chain(facts, _fatal_chain(facts.stderr)) or facts


def _with_chain(facts: _Facts, chain: str) -> _Facts | None:
    """``facts`` of the exception that ``chain`` ends with; None where it shows no traceback.

    A chain is what the interpreter prints for an exception: tracebacks, each raised from the one before.
    """
    block = chain.rpartition(_HEADER)[2]
    frames = _frames(block)
    found = _ERROR_LINE.search(block)
    if not frames or found is None:
        return None
    return replace(
        facts,
        kind=FailureKind.EXCEPTION,
        error=found["error"].rpartition(".")[2],
        message=found["message"] or "",
        text=_messages(chain),
        frames=frames,
    )


def _fatal_chain(stderr: str) -> str:
    """The last chain of tracebacks that may have ended the interpreter; empty when there is none."""
    before, *blocks = _RANK_PREFIX.sub("", stderr).split(_HEADER)
    chain = ""
    for block in blocks:
        if before.rstrip().endswith(_CAUSE):
            chain += _HEADER + block
        elif not _NOT_FATAL.search(before):
            chain = block
        before = block
    return chain


def _messages(chain: str) -> str:
    """The lines of a chain that show no code: the exceptions' types and messages."""
    return "\n".join(line for line in chain.splitlines() if line and not line[0].isspace())


def _frames(text: str) -> tuple[_Frame, ...]:
    return tuple(
        _Frame(m["file"], int(m["line"]), m["function"] or "", m["source"] or "")
        for m in _FRAME.finditer(text)
    )


def _dumped_frames(stderr: str) -> tuple[_Frame, ...]:
    dumps = list(_DUMP.finditer(stderr))
    return _frames(dumps[-1]["frames"])[::-1] if dumps else ()


# ---- rules


@functools.cache
def _pattern(expression: str) -> re.Pattern[str]:
    return re.compile(expression, re.IGNORECASE | re.MULTILINE)


def _rule_of(facts: _Facts) -> Rule:
    return next(rule for rule in RULES[facts.kind] if _fits(rule, facts))


def _fits(rule: Rule, facts: _Facts) -> bool:
    """Whether every condition of ``rule`` holds, the cheap ones first."""
    return (
        (not rule.types or facts.error in rule.types)
        and (not rule.codes or facts.code in rule.codes)
        and (not rule.oom_killed or facts.oom_killed)
        and (not rule.before_first_step or facts.steps == 0)
        and (
            not rule.raised_in
            or _found(rule.raised_in, facts.frames[-1].file if facts.frames else "")
        )
        and (not rule.text or _found(rule.text, facts.text))
    )


def _found(expression: str, text: str) -> bool:
    return _pattern(expression).search(text) is not None


def _subject(rule: Rule, facts: _Facts) -> str:
    found = _pattern(rule.subject).search(facts.text) if rule.subject else None
    return next((group for group in found.groups() if group), "") if found else ""


# ---- words


def _title(failure: Failure, facts: _Facts, title: str) -> str:
    what, _, why = title.partition(": ")
    if facts.kind is FailureKind.SIGNAL and failure.kind is FailureKind.EXIT:
        what, why = f"left with exit code {failure.exit_code}", f"a program that it ran {what}"
    host = f" ({failure.hostname})" if failure.hostname else ""
    reported = facts.kind in (FailureKind.EXCEPTION, FailureKind.SPAWN)
    said = _one_line(facts.message, _TITLE_LIMIT) if reported else ""
    where = f"rank {failure.rank} {what} on node {failure.node_id}{host}"
    return ": ".join(part for part in (where, why, said) if part)


def _evidence(facts: _Facts, rule: Rule) -> str:
    if rule.evidence:
        return rule.evidence
    if facts.kind is FailureKind.EXCEPTION:
        error = f"{facts.error}: {facts.message}" if facts.message else facts.error
        return f"{facts.frame}\n{_one_line(error)}" if facts.frame else _one_line(error)
    if facts.kind is FailureKind.SPAWN:
        return _one_line(facts.message)
    return _last_words(facts, rule)


def _last_words(facts: _Facts, rule: Rule) -> str:
    """What stderr says of a process that left no exception."""
    said = list(_pattern(rule.text).finditer(facts.stderr)) if rule.text else []
    if said:
        start = facts.stderr.rfind("\n", 0, said[-1].end()) + 1
        return _one_line(facts.stderr[start:].partition("\n")[0])
    if facts.frames:
        top, frame = facts.frames[-1], facts.frame
        return str(top) if frame is top else f"{top}, called at {frame}"
    lines = [line for line in facts.stderr.splitlines() if line.strip()]
    return _one_line(lines[-1]) if lines else "it wrote nothing to its standard error"


def _signature(failure: Failure, facts: _Facts, rule: Rule) -> str:
    if facts.kind is FailureKind.EXCEPTION:
        frame = facts.frame
        where = f":{frame.name}:{frame.function}:{frame.line}" if frame else ""
        return f"exception:{facts.error}{where}"
    if failure.kind is FailureKind.SIGNAL:
        return f"signal:{_signal_name(facts.code)}{':oom' if rule.oom_killed else ''}"
    if failure.kind is FailureKind.EXIT:
        return f"exit:{failure.exit_code}"
    return "spawn"


def _when(failure: Failure) -> tuple[float, int, str]:
    return failure.time, failure.rank, failure.id


def _signal_name(number: int) -> str:
    """``SIGKILL``; ``SIG40`` for a number without a name."""
    return signal.Signals(number).name if number in _NAMED_SIGNALS else f"SIG{number}"


def _one_line(text: str, limit: int = _LINE_LIMIT) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
