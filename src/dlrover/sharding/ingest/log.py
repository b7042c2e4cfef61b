"""One partition of a stream on disk: segments that records are appended to, and that go as a whole."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from dlrover.errors import InfrastructureError
from dlrover.sharding.ingest import frames

logger = logging.getLogger(__name__)

SEGMENT = 64 * 1024 * 1024
"""Bytes of a segment, about."""
STEP = 64 * 1024
"""Bytes between two entries of the index in memory, at least."""
PRODUCERS = 10_000
"""Producers of a partition that are remembered; beyond, those that were silent the longest are not."""
READ = 4 * 1024 * 1024
"""Bytes of records in one answer, about."""
_SNAPSHOT = ""
"""The producer of a frame that holds what is known of all producers."""


class Refused(NamedTuple):
    """Why a batch is not taken."""

    status: int
    """Of HTTP."""
    reason: str


class Appended(NamedTuple):
    """Where a batch of records stands now."""

    first: int
    end: int
    repeated: bool
    """It was there already."""


class Last(NamedTuple):
    """A producer's last batch."""

    sequence: int
    first: int
    end: int
    content: int


class _Segment:
    """A file, and where some of its frames begin."""

    def __init__(self, path: Path) -> None:
        self.path, self.first = path, int(path.stem)
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = 0
        self.offsets: list[int] = []
        self.positions: list[int] = []

    def note(self, frame: frames.Frame) -> None:
        """A frame lies behind all others."""
        if frame.number and (not self.positions or frame.position - self.positions[-1] >= STEP):
            self.offsets.append(frame.offset)
            self.positions.append(frame.position)
        self.size = frame.position + frame.size

    def scan(self, position: int, stop: int) -> Iterator[tuple[frames.Frame, list[bytes]]]:
        """The frames from a position on."""
        while position < stop:
            whole = frames.size(os.pread(self.fd, frames.HEAD.size, position))
            if not whole or position + whole > stop:
                raise InfrastructureError(f"the frame at byte {position} is cut off")
            frame, records = frames.unpacked(os.pread(self.fd, whole, position), position)
            yield frame, records
            position += whole

    def __del__(self) -> None:
        if hasattr(self, "fd"):  # a reader may have been the last that held it
            os.close(self.fd)


class PartitionLog:
    """Records by offset. What `append` has returned is on the disk; what is not there is not read.

    Raises:
        InfrastructureError: the files are damaged, other than by a crash while the last batch was written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        # ---- all below are guarded by _lock
        self._segments = [_Segment(path) for path in sorted(folder.glob("*.log"))]
        self._producers: OrderedDict[str, Last] = OrderedDict()
        self._next = 0
        """The offset of the next record; those from ``_end`` on are not yet on the disk."""
        self._end = 0
        self._broken = ""
        for number, segment in enumerate(self._segments):
            self._recover(segment, last=number == len(self._segments) - 1)
        self._end = self._next
        if not self._segments:
            self._roll()

    # ---- what there is

    @property
    def first(self) -> int:
        """The first offset that is kept."""
        return self._segments[0].first

    @property
    def end(self) -> int:
        """The offset behind the last record on the disk."""
        return self._end

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        with self._lock:
            return sum(segment.size for segment in self._segments)

    # ---- writing

    def append(self, producer: str, sequence: int, records: Sequence[bytes]) -> Appended | Refused:
        """Keep a batch of records; once, however often it comes.

        Args:
            producer: who pushes; each has its own sequence.
            sequence: 0 for the producer's first batch, and one more for each that follows.
            records: one or more.
        """
        content = frames.content(records)
        with self._lock:
            if self._broken:
                return Refused(503, self._broken)
            found = self._known(producer, sequence, content)
            if found is None:
                found = self._write(producer, sequence, records, content)
        if isinstance(found, Appended):
            return self._synced(found)
        return found

    def _known(self, producer: str, sequence: int, content: int) -> Appended | Refused | None:
        """The answer to a batch that is no new one."""
        last = self._producers.get(producer)
        due = last.sequence + 1 if last is not None else 0
        if sequence > due:
            return Refused(409, f"sequence is {sequence}; the next batch of {producer} is {due}")
        if last is None or sequence == due:
            return None
        if sequence < last.sequence:
            return Appended(last.end, last.end, repeated=True)  # earlier: nobody waits for where
        if content != last.content:
            return Refused(409, f"batch {sequence} of {producer} came before, with other records")
        return Appended(last.first, last.end, repeated=True)

    def _write(
        self, producer: str, sequence: int, records: Sequence[bytes], content: int
    ) -> Appended | Refused:
        data = frames.packed(self._next, producer, sequence, records)
        try:
            segment = self._segments[-1]
            if segment.size >= SEGMENT:
                segment = self._roll()
            self._put(segment, data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return Refused(507, "the disk is full")
            self._broken = f"the log cannot be written: {error.strerror}"
            return Refused(503, self._broken)
        first, count = self._next, len(records)
        segment.note(
            frames.Frame(segment.size, len(data), first, count, producer, sequence, content)
        )
        self._next += count
        self._remember(producer, Last(sequence, first, self._next, content))
        return Appended(first, self._next, repeated=False)

    def _put(self, segment: _Segment, data: bytes) -> None:
        """Write behind the last frame, all or nothing."""
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(segment.fd, data[written:], segment.size + written)
        except OSError:
            os.ftruncate(segment.fd, segment.size)
            raise

    def _synced(self, found: Appended) -> Appended | Refused:
        """Wait until it is on the disk; whoever waits meanwhile shares the next turn."""
        if found.end <= self._end:
            return found
        with self._syncing:
            if found.end <= self._end:
                return found
            with self._lock:
                segment, reached = self._segments[-1], self._next
            try:
                os.fdatasync(segment.fd)
            except OSError as error:  # what was written may be gone: a second try would hide it
                with self._lock:
                    self._broken = f"the disk has lost data: {error.strerror}"
                return Refused(503, self._broken)
            with self._lock:
                self._end = max(self._end, reached)
        return found

    def _remember(self, producer: str, last: Last) -> None:
        self._producers[producer] = last
        self._producers.move_to_end(producer)
        while len(self._producers) > PRODUCERS:
            self._producers.popitem(last=False)

    def _roll(self) -> _Segment:
        """Begin another segment, which says what is known of all producers."""
        if self._segments:
            os.fdatasync(self._segments[-1].fd)
        segment = _Segment(self._folder / f"{self._next:020}.log")
        self._introduce(segment)
        self._segments.append(segment)
        return segment

    def _introduce(self, segment: _Segment) -> None:
        """Write what is known of all producers into an empty segment."""
        known = msgspec.msgpack.encode(dict(self._producers))
        data = frames.packed(self._next, _SNAPSHOT, 0, [known])
        self._put(segment, data)
        segment.size = len(data)
        os.fdatasync(segment.fd)
        directory = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    # ---- reading

    def read(self, start: int, stop: int, most: int) -> tuple[int, list[bytes]]:
        """Records from an offset on.

        Returns:
            The offset of the first one, which is behind ``start`` if that is no longer kept; and ``most``
            records at most, or about `READ` bytes of them.
        """
        with self._lock:
            start, stop = max(start, self.first), min(stop, self._end)
            segments = list(self._segments)
            sizes = [segment.size for segment in segments]
        found: list[bytes] = []
        taken, wanted = 0, min(most, stop - start)
        number = max(0, bisect_right([segment.first for segment in segments], start) - 1)
        while len(found) < wanted and taken < READ and number < len(segments):
            segment = segments[number]
            at = bisect_right(segment.offsets, start) - 1
            position = segment.positions[at] if at >= 0 else 0
            for frame, records in segment.scan(position, sizes[number]):
                if frame.producer == _SNAPSHOT or frame.offset + frame.number <= start:
                    continue
                part = records[max(0, start - frame.offset) :][: wanted - len(found)]
                found += part
                taken += sum(map(len, part))
                if len(found) >= wanted or taken >= READ:
                    break
            number += 1
        return start, found

    def drop(self, before: int, older_than: float | None = None) -> None:
        """Remove segments that hold nothing from offset ``before`` on, or nothing younger than seconds."""
        now = time.time()
        with self._lock:
            while len(self._segments) > 1:
                oldest, following = self._segments[:2]
                if older_than is not None:
                    gone = now - os.fstat(oldest.fd).st_mtime > older_than
                else:
                    gone = following.first <= before
                if not gone:
                    return
                oldest.path.unlink(missing_ok=True)
                self._segments.pop(0)

    # ---- after a start

    def _recover(self, segment: _Segment, *, last: bool) -> None:
        """Read a segment; cut off what a crash has left of its last frame."""
        size = os.fstat(segment.fd).st_size
        try:
            for frame, records in segment.scan(0, size):
                self._take_in(segment, frame, records)
        except InfrastructureError as error:
            if not last:
                raise InfrastructureError(f"{segment.path}: {error}.") from error
            logger.warning(
                "%s: %s; a crash while it was written leaves that. %d bytes are cut off.",
                segment.path, error, size - segment.size,
            )  # fmt: skip
            os.ftruncate(segment.fd, segment.size)
            os.fdatasync(segment.fd)
        self._next = max(self._next, segment.first)
        if not segment.size:
            self._introduce(segment)

    def _take_in(self, segment: _Segment, frame: frames.Frame, records: list[bytes]) -> None:
        segment.note(frame)
        if frame.producer == _SNAPSHOT:
            known = msgspec.msgpack.decode(records[0], type=dict[str, Last])
            for producer, last in known.items():
                self._remember(producer, last)
            return
        end = frame.offset + frame.number
        self._next = end
        self._remember(frame.producer, Last(frame.sequence, frame.offset, end, frame.checksum))
