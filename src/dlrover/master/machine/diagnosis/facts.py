"""The facts of a failure record: what was raised, which signal came, and in whose code.

Pure: reads nothing but the record. A record may be read in several ways: a program that runs others
leaves with an exit code, and only its log shows how those ended.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dlrover.master.machine.diagnosis import log, traceback as tracebacks
from dlrover.master.machine.diagnosis.traceback import (
    Raised,
    TracebackFrame,
    is_user_file,
    one_line,
)
from dlrover.spec.failure import OWN_ENDS, Failure, FailureKind, OwnCode

NAMED_SIGNALS = frozenset(signal.Signals)
"""Numbers of the signals that have a name."""

EXCEPTIONS_READ = 16
"""Maximum number of exceptions of a log that are examined: the last ones."""

UNKNOWN_CODE = -1
"""Exit code of a log whose program's exit code is unknown."""
_UNCAUGHT_EXCEPTION = 1
"""The interpreter's exit code after it printed a traceback."""
_INTERRUPT = "KeyboardInterrupt"


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL``, or ``SIG40`` for a number without a name."""
    return signal.Signals(number).name if number in NAMED_SIGNALS else f"SIG{number}"


@dataclass(frozen=True)
class Facts:
    """One reading of a failure record."""

    kind: FailureKind
    #: exit code or signal number
    code: int
    #: the exception's type without its module
    error: str
    #: first line of the message that is not blank
    message: str
    #: text that a rule's ``text`` is searched in
    text: str
    stderr: str
    #: innermost last
    frames: tuple[TracebackFrame, ...]
    oom_killed: bool
    steps: int
    #: messages of the node's kernel and file systems
    node: tuple[str, ...]
    #: True if the program itself called exit (unless its code stands for a signal) or sent itself a signal
    ended_itself: bool = False
    #: True if ``text`` is from exceptions that were being handled, which may be unrelated
    of_handled: bool = False
    #: ``text`` without the words of the user's own files; None if it has none of them
    given: str | None = None

    @functools.cached_property
    def folded(self) -> str:
        """``text`` in lower case."""
        return self.text.lower()

    @functools.cached_property
    def folded_given(self) -> str:
        """``given`` in lower case."""
        return self.folded if self.given is None else self.given.lower()

    @functools.cached_property
    def own_code(self) -> OwnCode:
        """The part of the user's own files in the failure."""
        if self.kind is not FailureKind.EXCEPTION:
            return OwnCode.RAISES if self.ended_itself else OwnCode.ABSENT
        if not self.frames:
            return OwnCode.CALLS
        if self.frames[-1].raises:
            return OwnCode.RAISES
        calls = any(is_user_file(frame.file) for frame in self.frames)
        return OwnCode.CALLS if calls else OwnCode.ABSENT

    @property
    def frame(self) -> TracebackFrame | None:
        """The innermost frame of the user's own code; otherwise the innermost of all."""
        innermost_first = self.frames[::-1]
        own = (f for f in innermost_first if is_user_file(f.file))
        return next(own, innermost_first[0] if innermost_first else None)

    @property
    def place(self) -> str:
        """File name and line of `frame`, such as ``train.py:12``."""
        frame = self.frame
        return f"{frame.name}:{frame.line}" if frame else "the place that its log shows"


def read(failure: Failure) -> list[Facts]:
    """Return the possible readings of a record, the likeliest first; at least one."""
    facts = Facts(
        kind=failure.kind,
        code=failure.exit_code or 0,
        error=one_line(failure.exception.rpartition(".")[2]),
        message=_first_line(failure.message),
        text=log.plain(failure.stderr_tail),
        stderr=failure.stderr_tail,
        frames=(),
        oom_killed=failure.oom_killed,
        steps=failure.steps,
        node=failure.node_facts,
    )
    if failure.handled_signal:
        return [_with_signal(facts, failure.handled_signal)]
    if failure.kind is FailureKind.EXCEPTION:
        return _read_exception(facts, failure)
    if failure.kind in (FailureKind.SPAWN, FailureKind.NODE):
        return [replace(facts, text=failure.message)]
    return _read_end(facts, failure)


def _read_end(facts: Facts, failure: Failure) -> list[Facts]:
    """Return the readings of an exit code or a signal, by who caused it."""
    if failure.exception in OWN_ENDS:
        frames = _frames_of(failure.traceback)
        by_exit = failure.exception in ("SystemExit", "os._exit")
        own = bool(frames) and is_user_file(frames[-1].file)
        itself = own and by_exit is (failure.kind is FailureKind.EXIT)
        facts = replace(facts, frames=frames, ended_itself=itself)
    if failure.kind is FailureKind.SIGNAL:
        if failure.signal == signal.SIGINT and _raised_interrupt(failure):
            return _read_exception(replace(facts, kind=FailureKind.EXCEPTION), failure)
        return [_with_signal(facts, failure.signal or 0)]
    if facts.code - log.SHELL_BASE in NAMED_SIGNALS:
        return [_with_signal(replace(facts, ended_itself=False), facts.code - log.SHELL_BASE)]
    if facts.code == _UNCAUGHT_EXCEPTION and not facts.ended_itself:
        return read_log(facts)
    # A program that runs others may exit with their code.
    passed_on = read_log(facts) if failure.exception == "SystemExit" else []
    return [facts, *passed_on]


def _raised_interrupt(failure: Failure) -> bool:
    """Return whether the program's own line raised `_INTERRUPT`, for which the interpreter then sends itself SIGINT."""
    if failure.exception != _INTERRUPT:
        return False
    last = next(iter(tracebacks.raised(failure.traceback)[::-1]), None)
    if last is None or not last.frames or _INTERRUPT in last.handled:  # raised again for a real one
        return False
    return last.frames[-1].raises and _INTERRUPT in last.frames[-1].source


def read_log(facts: Facts) -> list[Facts]:
    """Return the possible readings of a log, the last exception first.

    ``facts.stderr`` holds the log.
    """
    text = log.plain(facts.stderr)
    quiet = log.without_warnings(text)
    facts = replace(facts, node=(*facts.node, *quiet.splitlines()))
    found = list(_exceptions(facts, tracebacks.raised(text)))
    number = log.signal_in(quiet)
    if number:
        found.append(_with_signal(replace(facts, text=quiet), number))
    return [*found, replace(facts, text=quiet), replace(facts, text=text)]


def _exceptions(facts: Facts, raised: list[Raised]) -> Iterator[Facts]:
    later = ""  # chain of the exception after it: what that contains is no failure of its own
    for found in raised[::-1][:EXCEPTIONS_READ]:
        is_part, later = found.chain in later, f"{found.handled}\n{found.chain}"
        if is_part:
            continue
        carrier, _, carried = found.error.rstrip(")").partition("(")
        is_carrier = carrier in log.CARRIERS
        if _is_launchers(found) or (is_carrier and not carried):
            continue
        one = replace(found, error=carried, frames=()) if is_carrier else found  # RayTaskError(...)
        yield _with_raised(facts, one)
        if one.handled:
            yield _handled(_with_raised(facts, one), one)


def _is_launchers(one: Raised) -> bool:
    return bool(one.frames) and log.LAUNCHER_FILE.search(one.frames[-1].file) is not None


def _with_raised(facts: Facts, one: Raised) -> Facts:
    return replace(
        facts,
        kind=FailureKind.EXCEPTION,
        error=one.error,
        message=_first_line(one.message),
        text=log.plain(one.chain),
        given=log.plain(one.given),
        frames=one.frames,
    )


def _with_signal(facts: Facts, number: int) -> Facts:
    frames = facts.frames or tracebacks.dumped_frames(facts.stderr)
    return replace(facts, kind=FailureKind.SIGNAL, code=number, frames=frames)


def _read_exception(facts: Facts, failure: Failure) -> list[Facts]:
    """Return the readings of an exception, by what it was raised from and what it carries."""
    # A library that carries an exception over from another process puts that process's traceback into the
    # message; what was raised there says more than how it got here.
    carried = tracebacks.raised(failure.message) if tracebacks.HEADER in failure.message else []
    if carried and carried[-1].frames:
        return [_with_raised(facts, carried[-1])]
    raised = tracebacks.raised(failure.traceback)
    last = raised[-1] if raised else None
    own = failure.message
    if last is not None:
        own = last.chain if failure.message in last.chain else f"{failure.message}\n{last.chain}"
    facts = replace(
        facts,
        text=log.plain(own),
        given=log.plain(last.given) if last else None,
        frames=last.frames if last else _frames_of(failure.traceback),
    )
    if last is None or not last.handled:
        return [facts]
    return [facts, _handled(facts, last)]


def _handled(facts: Facts, one: Raised) -> Facts:
    return replace(facts, text=log.plain(one.handled), given=None, of_handled=True)


def _frames_of(traceback: str) -> tuple[TracebackFrame, ...]:
    """Return the frames of a traceback, which may lack its exception."""
    found = tracebacks.raised(f"{traceback.rstrip()}\nError\n") if traceback else []
    return next((one.frames for one in reversed(found) if one.frames), ())


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
