"""Folding of tracebacks on the console: what one worker has shown already, and what only follows a peer's end.

When a rank dies, its peers fail in their next collective operation, each with a traceback of its own; when the
program has a mistake, all ranks show the same one. The console shows one of them, and a line for each other one;
the workers' log files have all of them.
"""

from __future__ import annotations

import hashlib
import re

START = b"Traceback (most recent call last):"
RANK = re.compile(rb"\[rank\d+\]: ?")
"""Prefix that PyTorch puts before each line of a traceback."""
_PREFIX_BEGUN = re.compile(rb"\[(r|ra|ran|rank\d*)?|\[rank\d+\]")
ECHO = re.compile(
    rb"Connection (closed by peer|reset by peer)|Broken pipe|Socket Timeout|DistBackendError|DistNetworkError|"
    rb"remote process exited|NCCL communicator was aborted|Connection refused"
)
"""Part of an exception's line that tells of a peer's end."""
TAKEN = b"EADDRINUSE"
"""Part of the line of an error of the same type that tells of a port that is taken."""
INTERRUPT = b"KeyboardInterrupt"
"""The exception's line of a worker that Ctrl-C ends: each rank is at a line of its own."""
CHAINS = (
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
)
_DETAIL = re.compile(rb"frame #\d+: |Exception raised from |C\+\+ CapturedTraceback|[ \t]")
"""Lines that may follow an exception's line and belong to it."""
_NUMBERS = re.compile(rb"\d+")
LONGEST = 256 * 1024
"""Most bytes of a traceback that waits for its end, and of an unfinished line."""
KNOWN = 10_000
"""Maximum number of known tracebacks; each rank shows further ones itself."""
SHOWN = 160
"""Most bytes of an exception's line in the line that takes its traceback's place."""


def _is_of_torch(text: bytes, exception: bytes) -> bool:
    """Return whether PyTorch raised an exception; other connections are the program's own."""
    innermost = text[text.rfind(b'  File "') :].partition(b"\n")[0]
    return exception.startswith((b"RuntimeError", b"torch.")) or b"/torch/" in innermost


class Tracebacks:
    """Tracebacks that the workers of one attempt have shown, by their text without numbers."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        """The first rank by digest of the text; at most `KNOWN`."""

    def meaning(self, rank: int, text: bytes, exception: bytes) -> str:
        """Return why a rank's traceback need not be shown; empty if it is to be shown."""
        if ECHO.search(exception) and TAKEN not in exception and _is_of_torch(text, exception):
            return "lost a peer"
        interrupt = exception == INTERRUPT
        known = INTERRUPT if interrupt else _NUMBERS.sub(b"", text)
        key = hashlib.blake2b(known, digest_size=16).digest()
        first = self._first.get(key, rank)
        if len(self._first) < KNOWN:
            self._first.setdefault(key, rank)
        if first == rank:
            return ""
        return (
            f"was interrupted like rank {first}"
            if interrupt
            else f"has the same traceback as rank {first}"
        )


class FoldingFormatter:
    """A formatter that lets the bytes of one worker's standard error pass, except for tracebacks that add nothing.

    Args:
        rank: The worker's rank.
        path: Its log file, which the lines in place of tracebacks name.
        seen: Shared by the workers of the attempt.
    """

    def __init__(self, rank: int, path: str, seen: Tracebacks) -> None:
        self._rank = rank
        self._path = path
        self._seen = seen
        self._partial = b""
        self._midway = False
        """True if the beginning of the current line is shown already."""
        self._held: list[bytes] = []
        """Lines of a traceback whose exception is not known yet."""
        self._size = 0
        """Bytes of these lines."""
        self._follows = False
        """True after a folded traceback: what belongs to it is dropped."""

    def feed(self, data: bytes) -> bytes:
        """Return what the console shows of ``data`` and of what was held back before."""
        *lines, rest = (self._partial + data).split(b"\n")
        shown = b""
        for line in lines:
            shown += line + b"\n" if self._midway else self._line(line + b"\n")
            self._midway = False
        if len(rest) > LONGEST or b"\r" in rest[:-1]:
            shown += self._give_up()  # no line of a traceback, but a progress bar, say
        self._midway = self._midway or not self._waits(rest)
        self._partial = b"" if self._midway else rest
        return shown + rest if self._midway else shown

    def flush(self) -> bytes:
        """Return what is held back, at the end of the stream."""
        held, self._held = [*self._held, self._partial], []
        self._partial = b""
        return b"".join(held)

    def _waits(self, rest: bytes) -> bool:
        """Return whether the rest of its line decides about an unfinished one."""
        prefix = RANK.match(rest)
        start = START.startswith(rest[prefix.end() :] if prefix else rest)
        return bool(self._held) or self._follows or start or bool(_PREFIX_BEGUN.fullmatch(rest))

    def _line(self, line: bytes) -> bytes:
        text = RANK.sub(b"", line, count=1).rstrip(b"\r\n")
        if self._held:
            self._held.append(line)
            self._size += len(line)
            if self._size > LONGEST:
                return self._give_up()
            inside = text.startswith((b" ", b"\t"))  # a frame; the exception's line is not indented
            return b"" if inside else self._judge(text)
        if text == START:
            self._held.append(line)
            self._size = len(line)
            return b""
        if self._follows and (not text or text in CHAINS or _DETAIL.match(text)):
            return b""
        self._follows = False
        return line

    def _give_up(self) -> bytes:
        """Return what is held: it is no traceback that can be folded, and nothing follows a folded one any more."""
        held, self._held, self._follows = self._held, [], False
        return b"".join(held)

    def _judge(self, exception: bytes) -> bytes:
        """Return the traceback that is held, or the line in its place; nothing if it belongs to a folded one."""
        text, self._held = b"".join(self._held), []
        if self._follows:
            return b""
        meaning = self._seen.meaning(self._rank, RANK.sub(b"", text), exception)
        if not meaning:
            return text
        self._follows = True
        shown = exception[:SHOWN].decode(errors="replace") + ("…" if len(exception) > SHOWN else "")
        return f"dlrover: rank {self._rank} {meaning}: {shown} (its traceback: {self._path})\n".encode()
