"""Files of rows on disk: segments of one size, to which records are appended, and which are deleted as a whole.

A record is a checksum, the number of uses, a key and a row. A record's place is its segment's number times the records of a segment, and
its number there. A segment's bytes are taken from the disk when it is made, and segments are made before rows need
them (`Segments.reserve`), so that a full disk is noticed while all rows can still move.

The files are an extension of one process's memory, not a copy that outlives it: a row that was used after it came to
the disk is newer in memory, so files that a killed process left hold rows of many different moments. They are
deleted; what outlives a process is a checkpoint, which is of one moment.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrover._native import cold
from dlrover._native.kernels import Kernels, kernels
from dlrover.embedding.options import Spill
from dlrover.errors import ConfigurationError, InfrastructureError

SEGMENTS = 64
BLOCK = 4096
"""Bytes that file systems take from a disk at a time."""
SPARE = 4
"""Segments beside those that live rows fill, at least: the one that is written, and room for two that are compacted."""
_USES, _KEY, _ROW = 6, 8, 16
"""Where a record's uses, key and row begin, after the checksum."""


class SegmentLayout(NamedTuple):
    """Sizes of the files."""

    record: int
    """Bytes of a record."""
    each: int
    """Records of a segment."""
    nbytes: int
    """Bytes of a segment, with what is left of its last block."""

    @property
    def most(self) -> int:
        """Live records of all segments, at most."""
        return self.capacity(SEGMENTS)

    def capacity(self, segments: int) -> int:
        """Return the live records of some segments, at most: an eighth is room for what is dead and not yet deleted."""
        return max(0, segments - spare(segments)) * self.each


def spare(segments: int) -> int:
    """Return how many of some segments live rows do not fill."""
    return max(SPARE, segments // 8)


def layout(nbytes: int, width: int) -> SegmentLayout:
    """Return the sizes for a limit and rows of ``width`` bytes.

    Raises:
        ConfigurationError: The limit is too low.
    """
    record = _ROW + (width + 7) // 8 * 8
    segment = nbytes // SEGMENTS // BLOCK * BLOCK
    each = min(segment // record, cold.RECORDS // SEGMENTS)
    if each < 1:
        least = SEGMENTS * ((record + BLOCK - 1) // BLOCK * BLOCK)
        raise ConfigurationError(
            f"spill.nbytes is {nbytes}; with rows of {width} bytes, {least} or more is accepted."
        )
    return SegmentLayout(record, each, (each * record + BLOCK - 1) // BLOCK * BLOCK)


class Segments:
    """The files of one table. One thread at a time uses it."""

    def __init__(self, spill: Spill, sizes: SegmentLayout, width: int, choice: str) -> None:
        self._spill, self._sizes, self._width = spill, sizes, width
        self._kernels: Kernels = kernels(choice)
        self._reader = cold.reader(choice)
        self._directory: Path | None = None
        self._process = os.getpid()
        self._files = np.full(SEGMENTS, -1, np.int32)
        self._filled = np.zeros(SEGMENTS, np.int64)
        self.live = np.zeros(SEGMENTS, np.int64)
        """Records of each segment that the index names."""
        self._active = -1
        self._reserved = 0
        self.refusal: str | None = None
        """Why the disk gave no segment when it was asked last."""

    # ---- room

    def room(self) -> int:
        """Return the number of records that can be written without deleting a segment."""
        return self._room(self.free())

    def free(self) -> int:
        """Return the number of segments that are empty, or can be made."""
        return len(self._empty()) + (0 if self.refusal else SEGMENTS - self._made())

    def low(self) -> bool:
        """Return whether few segments are free: less than half of those that live rows do not fill."""
        return self.free() < spare(self._made() if self.refusal else SEGMENTS) // 2

    def nbytes(self) -> int:
        """Return the bytes of all files."""
        return self._made() * self._sizes.nbytes

    def reserve(self, records: int) -> int:
        """Make segments until ``records`` may be live, and delete what is empty and more; return how many may be.

        These are fewer if the disk refuses a segment; `refusal` says why.
        """
        self._reserved = records
        while self._sizes.capacity(self._made()) < records and self._grows():
            pass
        self._trim()
        return self._sizes.capacity(self._made())

    def prepare(self, records: int) -> None:
        """Make segments until there is room for ``records``, as far as the disk gives them."""
        while self._room(len(self._empty())) < records and self._grows():
            pass

    def _room(self, segments: int) -> int:
        active = self._sizes.each - int(self._filled[self._active]) if self._active >= 0 else 0
        return segments * self._sizes.each + active

    def _empty(self) -> list[int]:
        """Return the segments that are made and not begun."""
        empty = (self._files >= 0) & (self._filled == 0)
        return [segment for segment in np.flatnonzero(empty).tolist() if segment != self._active]

    def _made(self) -> int:
        return int((self._files >= 0).sum())

    def _grows(self) -> bool:
        """Make a segment; return False if all are there, or the disk refuses it."""
        if self._made() == SEGMENTS:
            return False
        try:
            self._make()
        except OSError as error:
            self.refusal = error.strerror
            return False
        self.refusal = None
        return True

    def _trim(self) -> None:
        kept = SPARE - 1 if self._reserved else 0  # or each batch would make them again
        for segment in self._empty()[kept:][::-1]:
            if self._sizes.capacity(self._made() - 1) < self._reserved:
                return
            self._check_process()
            os.close(int(self._files[segment]))
            self._files[segment] = -1
            self._file(segment).unlink(missing_ok=True)

    def victim(self, busy: set[int]) -> int | None:
        """Return the complete segment with the fewest live records; None if none has dead ones."""
        chosen = self.live < self._filled
        chosen[[*busy, *([self._active] if self._active >= 0 else [])]] = False
        return int(np.where(chosen, self.live, self._sizes.each).argmin()) if chosen.any() else None

    def _check_process(self) -> None:
        """Check that this process began the files: a forked one shares their offsets, and would write over its rows.

        Raises:
            InfrastructureError: It is a forked one.
        """
        if os.getpid() != self._process:
            raise InfrastructureError(
                "An embedding table with a spill cannot be used in a forked process; open it there, or ask the process"
                " that made it."
            )

    # ---- records

    def append(self, keys: Any, counts: Any, rows: Any) -> Any:
        """Write rows with their uses; return their places, uint32. `room` says how many there is room for.

        Raises:
            InfrastructureError: The disk does not take them; nothing counts as written then.
        """
        self._check_process()
        records = np.zeros((len(keys), self._sizes.record), np.uint8)
        records[:, _USES:_KEY] = counts.view(np.uint8).reshape(-1, 2)
        records[:, _KEY:_ROW] = keys.view(np.uint8).reshape(-1, 8)
        records[:, _ROW : _ROW + self._width] = rows
        records[:, :_USES] = self._checksums(records)
        places = np.empty(len(keys), np.uint32)
        done = 0
        while done < len(keys):
            if self._active < 0 or self._filled[self._active] == self._sizes.each:
                self._begin()
            segment, at = self._active, int(self._filled[self._active])
            some = min(len(keys) - done, self._sizes.each - at)
            try:
                _write(
                    int(self._files[segment]), records[done : done + some], at * self._sizes.record
                )
            except OSError as error:
                raise self._failure(segment, "written", error) from error
            self._filled[segment] += some
            places[done : done + some] = np.arange(at, at + some) + segment * self._sizes.each
            done += some
        return places

    def keep(self, places: Any) -> None:
        """Count records as live."""
        self.live += np.bincount(places // self._sizes.each, minlength=SEGMENTS)

    def drop(self, places: Any, busy: set[int]) -> None:
        """Count records as dead, and delete complete segments that have no other; a busy one's user does that."""
        if len(places):
            self._check_process()
        self.live -= np.bincount(places // self._sizes.each, minlength=SEGMENTS)
        for segment in np.flatnonzero((self._filled > 0) & (self.live == 0)).tolist():
            if segment != self._active and segment not in busy:
                self.delete(segment)

    def read(self, keys: Any, places: Any) -> tuple[Any, Any]:
        """Return the uses of keys, uint16, and their rows, ``(n, width)``, from their places.

        Raises:
            InfrastructureError: A file cannot be read, or is damaged.
        """
        if not len(keys):
            return np.empty(0, np.uint16), np.empty((0, self._width), np.uint8)
        order = np.argsort(places)
        segments, at = np.divmod(places[order].astype(np.int64), self._sizes.each)
        records = np.empty((len(keys), self._sizes.record), np.uint8)
        offsets = (at * self._sizes.record).astype(np.uint64)
        try:
            self._read(np.ascontiguousarray(self._files[segments]), offsets, records)
        except OSError as error:
            raise InfrastructureError(
                f"A file in {self._directory} cannot be read: {error.strerror}."
            ) from error
        wrong = self._damaged(records) | (self._keys(records) != keys[order])
        if wrong.any():
            file = self._file(int(segments[wrong][0]))
            raise InfrastructureError(
                f"{file} is damaged: the record of key {keys[order][wrong][0]} is another than was written."
            )
        rows = np.empty((len(keys), self._width), np.uint8)
        rows[order] = records[:, _ROW : _ROW + self._width]
        counts = np.empty(len(keys), np.uint16)
        counts[order] = self._counts(records)
        return counts, rows

    def scan(self, segment: int, first: int, most: int) -> tuple[Any, Any, Any, Any, Any]:
        """Return keys, uses, rows, places of a segment's records from the ``first`` on, and whether each is damaged.

        Raises:
            InfrastructureError: The file cannot be read.
        """
        count = min(most, int(self._filled[segment]) - first)
        records = np.empty((count, self._sizes.record), np.uint8)
        places = np.arange(first, first + count)
        offsets = (places * self._sizes.record).astype(np.uint64)
        files = np.full(count, self._files[segment], np.int32)
        try:
            self._read(files, offsets, records)
        except OSError as error:
            raise self._failure(segment, "read", error) from error
        rows = records[:, _ROW : _ROW + self._width]
        places = (places + segment * self._sizes.each).astype(np.uint32)
        return self._keys(records), self._counts(records), rows, places, self._damaged(records)

    @staticmethod
    def _counts(records: Any) -> Any:
        return np.ascontiguousarray(records[:, _USES:_KEY]).view(np.uint16)[:, 0]

    def _read(self, files: Any, offsets: Any, records: Any) -> None:
        self._check_process()
        self._reader.read(files, offsets, records)

    @staticmethod
    def _keys(records: Any) -> Any:
        return np.ascontiguousarray(records[:, _KEY:_ROW]).view(np.uint64)[:, 0]

    def _damaged(self, records: Any) -> Any:
        return (records[:, :_USES] != self._checksums(records)).any(1)

    def _checksums(self, records: Any) -> Any:
        count, size = records.shape
        starts = records.ctypes.data + _USES + size * np.arange(count, dtype=np.uint64)
        sizes = np.full(count, size - _USES, np.uint64)
        return self._kernels.hash(starts, sizes).view(np.uint8).reshape(-1, 8)[:, :_USES]

    # ---- files

    def _file(self, segment: int) -> Path:
        assert self._directory is not None
        return self._directory / f"segment-{segment}"

    def _begin(self) -> None:
        """Begin the next segment."""
        if not self._empty() and not self._grows():
            raise InfrastructureError(
                f"The spill directory {self._spill.directory} takes no more rows: {self.refusal}."
            )
        self._active = self._empty()[0]

    def _make(self) -> None:
        """Make an empty segment, whose bytes are the file's from now on."""
        self._check_process()
        segment = int(np.argmax(self._files < 0))
        if self._directory is None:
            self._directory = _own_directory(self, self._files, self._spill.directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        file = os.open(self._file(segment), flags, 0o600)
        try:
            os.posix_fallocate(file, 0, self._sizes.nbytes)
        except OSError:
            os.close(file)
            self._file(segment).unlink()
            raise
        self._files[segment] = file

    def delete(self, segment: int) -> None:
        """Delete the records of a segment, which are dead, and its file if it is not reserved."""
        self._filled[segment] = 0
        self._trim()

    def _failure(self, segment: int, done: str, error: OSError) -> InfrastructureError:
        return InfrastructureError(f"{self._file(segment)} cannot be {done}: {error.strerror}.")


def _write(file: int, records: Any, offset: int) -> None:
    data = memoryview(records).cast("B")
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _own_directory(owner: Segments, files: Any, parent: str) -> Path:
    """Make a directory that is deleted with its owner, whose ``files`` are closed; delete those of processes that were killed."""
    place = Path(parent)
    place.mkdir(parents=True, exist_ok=True)
    for lock in place.glob("table-*.lock"):
        _delete_abandoned(lock)
    name = f"table-{os.getpid()}-{secrets.token_hex(4)}"
    lock = place / f"{name}.lock"
    while True:
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        if lock.exists() and lock.stat().st_ino == os.fstat(held).st_ino:
            break
        os.close(held)  # another process took it for an abandoned one
    own = place / name
    own.mkdir()
    weakref.finalize(owner, _end, files, own, lock, held, os.getpid())
    return own


def _end(files: Any, own: Path, lock: Path, held: int, process: int) -> None:
    """Close the segments, which take their room on the disk until then, and delete them."""
    for file in files[files >= 0].tolist():
        os.close(file)
    _delete(own, lock, held, process)


def _delete_abandoned(lock: Path) -> None:
    try:
        held = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return
    _delete(lock.with_suffix(""), lock, held, os.getpid())


def _delete(own: Path, lock: Path, held: int, process: int) -> None:
    """Delete a directory and then its lock, which is held until then; a forked process deletes nothing."""
    if os.getpid() == process:
        shutil.rmtree(own, ignore_errors=True)
        lock.unlink(missing_ok=True)
    os.close(held)
