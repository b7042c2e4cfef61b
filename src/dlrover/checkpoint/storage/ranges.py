"""Ranges of remote files, read by many concurrent requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

from dlrover.checkpoint.storage.stores import ByteRange, UnreachableError, join

READERS = 16
"""Maximum number of concurrent requests."""
REQUEST = 32 << 20
"""Maximum bytes per request."""
GAP = 1 << 16
"""Maximum gap in bytes that is read and discarded to save a request."""
READ_RETRIES = (0.5, 2.0)
"""Seconds to wait before each retry of a failed read, after the implementation's own retries."""
_Value = TypeVar("_Value")


class RangeStore(Protocol):
    """Store that the ranges are read from."""

    def size(self, file: str) -> int:
        """Return the size of a file in bytes."""

    def read_range(self, wanted: ByteRange) -> bytes:
        """Read a range of a file; return fewer bytes if the file ends before."""


class _Span(NamedTuple):
    """Neighbouring ranges of a file, read together."""

    file: str
    start: int
    buffer: bytearray


class FileRanges:
    """Ranges of the files in one folder; expected ones are read by many concurrent requests."""

    def __init__(self, source: RangeStore, folder: str) -> None:
        self._source = source
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._found: dict[ByteRange, memoryview] = {}

    def size(self, file: str) -> int:
        """Return the size of a file in bytes."""
        if file not in self._sizes:
            self._sizes[file] = self._source.size(join(self._folder, file))
        return self._sizes[file]

    def expect(self, wanted: Iterable[ByteRange]) -> None:
        """Read the ranges that will be viewed."""
        self._found.update(self._read({part for part in wanted if part.nbytes}))

    def view(self, wanted: ByteRange) -> memoryview:
        """Return the bytes of one range; the caller may overwrite them."""
        if not wanted.nbytes:
            return memoryview(b"")
        found = self._found.get(wanted)
        return self._read({wanted})[wanted] if found is None else found

    def fill(self, wanted: ByteRange, buffer: memoryview) -> None:
        """Copy the bytes of one range to a buffer."""
        buffer[:] = self.view(wanted)

    def _read(self, wanted: Iterable[ByteRange]) -> dict[ByteRange, memoryview]:
        groups = _neighbours(sorted(wanted))
        spans = [_span(group) for group in groups]
        requests = [(span, at) for span in spans for at in range(0, len(span.buffer), REQUEST)]
        if requests:
            with ThreadPoolExecutor(min(READERS, len(requests))) as pool:
                for done in [pool.submit(self._fill, *request) for request in requests]:
                    done.result()
        found = {}
        for span, group in zip(spans, groups, strict=True):
            whole = memoryview(span.buffer)
            for part in group:
                start = part.offset - span.start
                found[part] = whole[start : start + part.nbytes]
        return found

    def _fill(self, span: _Span, at: int) -> None:
        size = min(REQUEST, len(span.buffer) - at)
        file = join(self._folder, span.file)
        data = self._source.read_range(ByteRange(file, span.start + at, size))
        memoryview(span.buffer)[at : at + len(data)] = data


def _neighbours(ranges: list[ByteRange]) -> list[list[ByteRange]]:
    """Group ranges of one file with gaps of at most `GAP` bytes; ``ranges`` are in order."""
    groups: list[list[ByteRange]] = []
    end = 0
    for wanted in ranges:
        before = groups[-1][-1] if groups else None
        if before is None or wanted.file != before.file or wanted.offset > end + GAP:
            groups.append([])
            end = wanted.offset
        groups[-1].append(wanted)
        end = max(end, wanted.offset + wanted.nbytes)
    return groups


def _span(group: list[ByteRange]) -> _Span:
    start = group[0].offset
    end = max(wanted.offset + wanted.nbytes for wanted in group)
    return _Span(group[0].file, start, bytearray(end - start))


def again(read: Callable[[], _Value]) -> _Value:
    """Call ``read``; retry if the store does not answer."""
    delays = iter(READ_RETRIES)
    while True:
        try:
            return read()
        except UnreachableError:  # noqa: PERF203 - that is what the loop is for
            delay = next(delays, None)
            if delay is None:
                raise
            threading.Event().wait(delay)
