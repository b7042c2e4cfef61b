"""Copying of growing files to a console, line by line or raw, without blocking on the console.

A `OutputCopier` is a thread that drives one `Pump` per destination. A pump takes turns between its
sources and reads a file no faster than the destination accepts: the files are the buffer.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import os
import select
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

logger = logging.getLogger(__name__)

POLL_INTERVAL = 0.05
"""Seconds between two checks for new data, or for room in a blocked console."""
LINE_LIMIT = 1 << 20
"""Bytes after which an unfinished line is split; bounds the memory per stream."""
READ_SIZE = 1 << 16
"""Bytes read from one file before the next file's turn."""
KEPT = 1 << 17
"""Bytes of an in-memory file that stay after they were read: a worker's last output."""
KEEP_SIZE, PUNCH_HOLE = 1, 2
"""Mode flags of fallocate(2)."""


class LineSplitter:
    r"""A splitter of a byte stream into lines, independent of the stream's chunks.

    ``\n``, ``\r`` and ``\r\n`` end a line, so that each state of a progress bar is one line. Lines
    come without their line ends; a line longer than ``limit`` bytes is split.
    """

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._partial = b""
        self._after_return = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes."""
        if not data:
            return []
        # After a return, a newline is the second half of a line end that was already handled.
        text = self._partial + (data.removeprefix(b"\n") if self._after_return else data)
        self._after_return = data.endswith(b"\r")
        lines = text.splitlines()
        complete = not text or text.endswith((b"\n", b"\r"))
        self._partial = b"" if complete else lines.pop()
        pieces = [
            line[start : start + self._limit]
            for line in lines
            for start in range(0, len(line) or 1, self._limit)
        ]
        while len(self._partial) > self._limit:
            pieces.append(self._partial[: self._limit])
            self._partial = self._partial[self._limit :]
        return pieces

    def flush(self) -> list[bytes]:
        """Return the last line if the stream ended without a line end."""
        rest, self._partial = self._partial, b""
        return [rest] if rest else []


class LineFormatter:
    """A formatter that turns the bytes of one worker's stream into prefixed lines.

    With ``needles``, only lines that contain one of them pass. A needle across a split in a line
    longer than `LINE_LIMIT` is not found.
    """

    def __init__(self, prefix: str, needles: Iterable[str] = ()) -> None:
        self._prefix = prefix.encode(errors="surrogateescape")
        self._needles = [needle.encode(errors="surrogateescape") for needle in needles]
        self._splitter = LineSplitter()

    def feed(self, data: bytes) -> bytes:
        """Return the output for the lines that ``data`` completes."""
        return self._format(self._splitter.feed(data))

    def flush(self) -> bytes:
        """Return the output for an unfinished last line, with a line end added."""
        return self._format(self._splitter.flush())

    def _format(self, lines: list[bytes]) -> bytes:
        return b"".join(self._prefix + line + b"\n" for line in lines if self._passes(line))

    def _passes(self, line: bytes) -> bool:
        return not self._needles or any(needle in line for needle in self._needles)


class Formatter(Protocol):
    """What becomes of the bytes of one worker's stream on their way to the console."""

    def feed(self, data: bytes) -> bytes:
        """Return the output for the next bytes of the stream."""

    def flush(self) -> bytes:
        """Return the output that was held back, at the end of the stream."""


class GrowingFile:
    """A growing file that another process appends to, read from its beginning.

    With ``frees`` the file lies in memory, which is freed after reading, except for its end.
    """

    def __init__(
        self, path: Path, formatter: Formatter | None = None, *, frees: bool = False
    ) -> None:
        self._path = path
        self._frees = frees
        self._formatter = formatter
        self._descriptor: int | None = None
        self._offset = 0
        self.ended = False

    def read(self, *, final: bool) -> bytes | None:
        """Return the output for the next bytes, or None if there are none now.

        With ``final``, when no process writes any more, the end of the file ends the source.
        """
        try:
            data = self._read_bytes()
        except OSError as error:
            logger.warning("Stopped reading %s: %s", self._path, error)
            self.close()
            return None
        if data:
            return self._formatter.feed(data) if self._formatter else data
        if not final:
            return None
        self.close()
        return self._formatter.flush() if self._formatter else None

    def close(self) -> None:
        """End the source. Idempotent."""
        self.ended = True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read_bytes(self) -> bytes:
        if self._descriptor is None:
            try:
                mode = os.O_RDWR if self._frees else os.O_RDONLY
                self._descriptor = os.open(self._path, mode | os.O_CLOEXEC)
            except FileNotFoundError:  # the worker has not been started yet
                return b""
        data = os.pread(self._descriptor, READ_SIZE, self._offset)
        if len(data) == READ_SIZE:  # more follows: end this worker's turn at a line end
            data = data[: data.rfind(b"\n") + 1] or data
        self._offset += len(data)
        if data and self._frees and self._offset > KEPT:
            _free(self._descriptor, self._offset - KEPT)
        return data


class Sink:
    """A console or a file, written to without blocking.

    Bytes bypass ``file``'s buffer and go to its descriptor: bytes that the caller left in the buffer
    would come out later. A file without a descriptor, such as one in memory, must not block.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.descriptor: int | None = None
        with contextlib.suppress(OSError, ValueError):
            self.descriptor = file.fileno()

    def write(self, data: bytes) -> int:
        """Write ``data``, at most ``PIPE_BUF`` bytes, and return the bytes written; 0 if it would block.

        Raises:
            OSError: The other end is gone, or its disk is full.
            ValueError: The file is closed.
        """
        if self.descriptor is None:
            self._file.write(data)
            self._file.flush()
            return len(data)
        if self._file.closed:  # its descriptor may belong to another file by now
            raise ValueError("the file is closed")
        if not _await_room([self.descriptor], 0):
            return 0
        try:
            return os.write(self.descriptor, data)
        except BlockingIOError:  # the descriptor is non-blocking, and another process took the room
            return 0


class Pump:
    """A copier from several sources, in turn, to one sink; it reads no faster than the sink accepts."""

    def __init__(self, name: str, sink: Sink, sources: Iterable[GrowingFile]) -> None:
        self._name = name
        self._sink = sink
        self._sources = collections.deque(sources)
        self._pending = b""
        self._written = 0

    @property
    def done(self) -> bool:
        """True once all sources have ended and their output is written, or the sink is gone."""
        return not self._sources and self._written == len(self._pending)

    @property
    def blocked_on(self) -> int | None:
        """Descriptor of the sink while output is pending, else None."""
        return self._sink.descriptor if self._written < len(self._pending) else None

    def step(self, *, final: bool) -> bool:
        """Read once and write what the sink accepts; return whether any data moved."""
        loaded = self._written == len(self._pending) and self._load(final=final)
        try:
            return self._write() or loaded
        except (OSError, ValueError) as error:
            logger.warning("Stopped copying worker output to %s: %s", self._name, error)
            self.close()
            return False

    def close(self) -> None:
        """Close all sources and discard unwritten output."""
        for source in self._sources:
            source.close()
        self._sources.clear()
        self._pending, self._written = b"", 0

    def _load(self, *, final: bool) -> bool:
        for _ in range(len(self._sources)):
            source = self._sources.popleft()
            output = source.read(final=final)
            if not source.ended:
                self._sources.append(source)
            if output is not None:
                self._pending, self._written = output, 0
                return True
        return False

    def _write(self) -> bool:
        before = self._written
        while self._written < len(self._pending):
            taken = self._sink.write(self._next_piece())
            if not taken:
                break
            self._written += taken
        return self._written > before

    def _next_piece(self) -> bytes:
        """Return at most ``PIPE_BUF`` pending bytes, cut at a line end if possible.

        A pipe accepts this amount whole or not at all, so lines of several writers do not mix.
        """
        end = self._written + select.PIPE_BUF
        piece = self._pending[self._written : end]
        if end >= len(self._pending):
            return piece
        return piece[: piece.rfind(b"\n") + 1] or piece


class OutputCopier:
    """A thread that drives the pumps until everything is copied or the time is up."""

    def __init__(self, pumps: Sequence[Pump], resources: contextlib.ExitStack) -> None:
        self._pumps = pumps
        self._resources = resources
        self._stopping = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker-logs", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Copy the rest for at most ``timeout`` seconds; return whether all of it was copied."""
        self._stopping.set()
        self._thread.join(timeout)
        complete = not self._thread.is_alive()
        self._given_up.set()
        self._thread.join(2 * POLL_INTERVAL)
        return complete

    def _run(self) -> None:
        with self._resources:
            while not self._given_up.is_set() and not self._done():
                final = self._stopping.is_set()  # read before the files: no data arrives after it
                moved = [pump.step(final=final) for pump in self._pumps]
                if not any(moved) and not self._done():
                    self._wait(final=final)
            for pump in self._pumps:
                pump.close()

    def _done(self) -> bool:
        return all(pump.done for pump in self._pumps)

    def _wait(self, *, final: bool) -> None:
        blocked = [fd for pump in self._pumps if (fd := pump.blocked_on) is not None]
        if blocked:
            _await_room(blocked, POLL_INTERVAL)
        else:
            (self._given_up if final else self._stopping).wait(POLL_INTERVAL)


def _free(descriptor: int, size: int) -> None:
    """Free the first ``size`` bytes of a file without changing its length."""
    fallocate = ctypes.CDLL(None).fallocate
    fallocate(descriptor, KEEP_SIZE | PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(size))


def _await_room(descriptors: Iterable[int], timeout: float) -> bool:
    """Wait up to ``timeout`` seconds; return whether a write to one of ``descriptors`` would not block."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(timeout * 1000))
