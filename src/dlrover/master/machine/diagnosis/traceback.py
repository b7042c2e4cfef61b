"""Exceptions in a text: tracebacks as the interpreter prints them, and one-line mentions in a log.

Pure: reads nothing but the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

_LINE_LIMIT = 240
"""Maximum length of a message or source line as shown, in characters."""
_MESSAGE_LINES = 12
"""Maximum number of further lines kept of an exception's message."""

HEADER = "Traceback (most recent call last):"
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
MISTAKES = frozenset(
    {
        "AssertionError", "AttributeError", "IndexError", "KeyError", "NameError", "TypeError", "UnboundLocalError",
        "ZeroDivisionError",
    }
)  # fmt: skip
"""Exceptions that programming mistakes raise, whatever their messages say."""
# A message that quotes another exception, as in f"download failed: {error}".
_PASSED_ON = re.compile(r"\[Errno -?\d+\]|[a-z]Error\b ?[:(]|ConnectionPool\(|status[ _]?code\b")
_RAISING = re.compile(r"(?:^|[:;] ?)(?:raise|assert)\b")
_NOT_FATAL = re.compile(r"Exception (ignored|in thread)\b")
_FOREIGN_FILE = re.compile(
    r"""^<                                    # <frozen runpy>, <string>
      | /(site|dist)-packages/
      | /lib(64)?/(python|pypy)\d[^/]*/       # the standard library
      | /python\d+\.zip/
      | \.egg/
      | \.pyx$
      | /s?bin/[^/.]+$                        # entry points: torchrun, accelerate
      | /torch/(_\w+|autograd|cuda|distributed|multiprocessing|nn|optim|utils)/
      | /dlrover/(agent|checkpoint|data|integrations|planning|training)/
    """,
    re.VERBOSE,
)
_FRAME = re.compile(
    r"""^[ \t|+-]*File\ "(?P<file>[^"\n]+)",\ line\ (?P<line>\d+)(?:,?\ in\ (?P<function>.+))?$""",
    re.VERBOSE,
)
_SOURCE = re.compile(r"""^[ \t|]+(?!File\ ")(?P<source>[^\s|^~].*)$""")
_INDENTED = re.compile(r"^[ \t|+^~-]|^$")
_LEVEL = r"(?!(?:ERROR|WARN|WARNING|INFO|DEBUG|CRITICAL|FATAL)\b)"
_TYPE = r"(?P<error>[A-Za-z_][\w.]*(?:\(\w+\))?)"
_ERROR_LINE = re.compile(rf"^{_LEVEL}{_TYPE}(?::[ ]?(?P<message>.*))?$")
_BARE_ERROR_LINE = re.compile(
    r"""^(?P<error>(?:[A-Za-z_][\w.]*\.)?
            (?:\w*(?:Error|Exception|Interrupt|Failed|Failure|gaierror)(?:\(\w+\))?
             | (?<=[a-z_]\.)[A-Z][^\Wa-z]*[a-z]\w*)) # module.Name
        (?::[ ]?(?P<message>.*))?$""",
    re.VERBOSE,
)
# What faulthandler writes while the process dies, most recent call first.
_DUMP = re.compile(
    r"^Current thread 0x[^\n]*\(most recent call first\):\n(?P<frames>(?:[ \t]+File [^\n]*(?:\n|\Z))+)",
    re.MULTILINE,
)


def is_user_file(path: str) -> bool:
    """Return whether a traceback's file belongs to the user: no library, interpreter or launcher file."""
    return _FOREIGN_FILE.search(path.replace("\\", "/")) is None


def one_line(text: str, limit: int = _LINE_LIMIT) -> str:
    """Return ``text`` on one line of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


@dataclass(frozen=True)
class TracebackFrame:
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
    def raises(self) -> bool:
        """True if the line itself raises the exception, in one of the user's files."""
        return _RAISING.search(self.source) is not None and is_user_file(self.file)

    @property
    def name(self) -> str:
        """The file name without its folders, which differ between nodes and runs."""
        return PurePosixPath(self.file).name


@dataclass(frozen=True)
class Raised:
    """One exception in a text."""

    error: str
    """Type without the module."""
    message: str
    """All lines of the message."""
    frames: tuple[TracebackFrame, ...]
    """Calls, innermost last; empty if the text has no traceback of the exception."""
    chain: str
    """Type and message of the exception and of those that it was raised from."""
    handled: str
    """Types and messages of the exceptions that were being handled at the time."""
    given: str
    """Words of libraries and the system: the chain without the words of the user's own files.
    If one of these files raised it while handling another exception, the words of the latter are included."""


def raised(text: str) -> list[Raised]:
    """Return the exceptions in a text, in order, except those that only ended a thread or a finalizer.

    A traceback may lack its first line, and an exception its traceback.
    """
    return list(_Parser(text.splitlines()).read())


def dumped_frames(text: str) -> tuple[TracebackFrame, ...]:
    """Return the calls of the thread that crashed, as faulthandler writes them; innermost last."""
    dumps = list(_DUMP.finditer(text))
    found = (_FRAME.match(line) for line in dumps[-1]["frames"].splitlines()) if dumps else ()
    return tuple(_frame(m, "") for m in found if m)[::-1]


def _frame(found: re.Match[str], source: str) -> TracebackFrame:
    return TracebackFrame(found["file"], int(found["line"]), found["function"] or "", source)


class _Parser:
    """Parser that goes through the lines of a text once."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._at = 0
        #: frames of the traceback being read
        self._frames: list[TracebackFrame] = []
        #: the interpreter's sentence between the last exception and the next; empty if there is none
        self._link = ""
        self._fatal = True
        self._last: Raised | None = None

    def read(self) -> Iterator[Raised]:
        begun = False  # True in a traceback whose exception has not come yet
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            frame = _FRAME.match(line)
            if frame:
                self._frames.append(_frame(frame, self._source()))
                begun = True
            elif HEADER in line:
                self._frames, begun = [], True
            elif _NOT_FATAL.search(line):
                self._fatal = False
            elif line in (_CAUSE, _CONTEXT):
                self._link = line
            elif not _INDENTED.match(line):
                pattern = _ERROR_LINE if begun or self._link else _BARE_ERROR_LINE
                found = pattern.match(line)
                if found:
                    begun = False
                    yield from self._exception(found)

    def _source(self) -> str:
        found = _SOURCE.match(self._lines[self._at]) if self._at < len(self._lines) else None
        if found:
            self._at += 1
        return found["source"] if found else ""

    def _exception(self, found: re.Match[str]) -> Iterator[Raised]:
        error = found["error"].rpartition(".")[2]
        message = "\n".join([found["message"] or "", *self._more()])
        words = f"{found['error']}: {message}"
        before = self._last if self._link else None
        chain, handled = words, ""
        if before is not None and self._link == _CAUSE:
            chain, handled = f"{before.chain}\n{words}", before.handled
        elif before is not None:
            handled = f"{before.handled}\n{before.chain}".strip()
        given = "" if self._is_own(error, message) else words
        if before is not None and (self._link == _CAUSE or self._raises()):
            given = f"{before.given}\n{given}".strip()
        self._last = Raised(error, message, tuple(self._frames), chain, handled, given)
        fatal, self._fatal = self._fatal, True
        self._frames, self._link = [], ""
        if fatal:
            yield self._last

    def _raises(self) -> bool:
        return bool(self._frames) and self._frames[-1].raises

    def _is_own(self, error: str, message: str) -> bool:
        """Return whether the message is in the user's own words, which may say anything."""
        if self._raises():
            return _PASSED_ON.search(message) is None
        return error in MISTAKES and bool(self._frames) and is_user_file(self._frames[-1].file)

    def _more(self) -> Iterator[str]:
        """Yield the further lines of a message."""
        for line in self._lines[self._at : self._at + _MESSAGE_LINES]:
            ends = HEADER in line or _FRAME.match(line) or _BARE_ERROR_LINE.match(line)
            if ends or line in (_CAUSE, _CONTEXT) or _NOT_FATAL.search(line):
                return
            self._at += 1
            yield line
