"""The facts of a failure record: the frames of its traceback, the interpreter's last words.

Pure: it reads nothing but the record. Programs that are run by others pass on how those ended, and
exceptions carry others; what is read out here is what stands at the bottom.
"""

from __future__ import annotations

import functools
import re
import signal
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from dlrover.spec.failure import Failure, FailureKind

NAMED_SIGNALS = frozenset(signal.Signals)
"""Numbers of the signals that have a name."""

_LINE_LIMIT = 240
"""Characters of a message or source line that is shown."""


def is_user_file(path: str) -> bool:
    """Whether a traceback's file belongs to the user: no library, interpreter or launcher file."""
    return _FOREIGN_FILE.search(path) is None


def one_line(text: str, limit: int = _LINE_LIMIT) -> str:
    """``text`` on one line of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def signal_name(number: int) -> str:
    """``SIGKILL``; ``SIG40`` for a number without a name."""
    return signal.Signals(number).name if number in NAMED_SIGNALS else f"SIG{number}"


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
class Frame:
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
            parts.append(one_line(self.source))
        return ": ".join(parts)

    @property
    def name(self) -> str:
        """The file without its folders, which differ between nodes and runs."""
        return PurePosixPath(self.file).name


@dataclass(frozen=True)
class Facts:
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
    frames: tuple[Frame, ...]
    oom_killed: bool
    steps: int
    #: what the node's kernel and file systems say
    node: tuple[str, ...]

    @functools.cached_property
    def folded(self) -> str:
        """``text`` in lower case."""
        return self.text.lower()

    @property
    def frame(self) -> Frame | None:
        """The innermost frame of the user's own code, else the innermost of all."""
        innermost_first = self.frames[::-1]
        own = (f for f in innermost_first if is_user_file(f.file))
        return next(own, innermost_first[0] if innermost_first else None)

    @property
    def place(self) -> str:
        """``train.py:12`` of `frame`."""
        frame = self.frame
        return f"{frame.name}:{frame.line}" if frame else "the place that its log shows"


def read(failure: Failure) -> Facts:
    """The facts of ``failure``."""
    facts = Facts(
        kind=failure.kind,
        code=failure.exit_code or 0,
        error=one_line(failure.exception.rpartition(".")[2]),
        message=next((line.strip() for line in failure.message.splitlines() if line.strip()), ""),
        text=failure.stderr_tail,
        stderr=failure.stderr_tail,
        frames=(),
        oom_killed=failure.oom_killed,
        steps=failure.steps,
        node=failure.node_facts,
    )
    if failure.kind is FailureKind.EXCEPTION:
        return _read_exception(facts, failure)
    if failure.kind in (FailureKind.SPAWN, FailureKind.NODE):
        return replace(facts, text=failure.message)
    if failure.kind is FailureKind.SIGNAL:
        return replace(facts, code=failure.signal or 0, frames=_dumped_frames(failure.stderr_tail))
    return _read_exit(facts)


def _read_exception(facts: Facts, failure: Failure) -> Facts:
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


def _read_exit(facts: Facts) -> Facts:
    """Look behind an exit code: programs that are run by others pass on how those ended."""
    if facts.code - 128 in NAMED_SIGNALS:
        frames = _dumped_frames(facts.stderr)
        return replace(facts, kind=FailureKind.SIGNAL, code=facts.code - 128, frames=frames)
    if facts.code != _UNCAUGHT_EXCEPTION:
        return facts
    return _with_chain(facts, _fatal_chain(facts.stderr)) or facts


def _with_chain(facts: Facts, chain: str) -> Facts | None:
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


def _frames(text: str) -> tuple[Frame, ...]:
    return tuple(
        Frame(m["file"], int(m["line"]), m["function"] or "", m["source"] or "")
        for m in _FRAME.finditer(text)
    )


def _dumped_frames(stderr: str) -> tuple[Frame, ...]:
    dumps = list(_DUMP.finditer(stderr))
    return _frames(dumps[-1]["frames"])[::-1] if dumps else ()
