"""Rows of a table that lie on disk: which keys they are of, their records, and the compaction of segments."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np

from dlrover._native import cold
from dlrover._native.cold import NOWHERE, Headers
from dlrover._native.tables import Copied
from dlrover.embedding.options import Spill
from dlrover.embedding.tiers.segments import SegmentLayout, Segments
from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)

MOVED = 256
"""Records that compaction moves at a time: others wait for the lock no longer than that takes."""


class ColdRows:
    """Rows on disk. Whoever calls a method holds ``lock``, which compaction in the background takes as well."""

    def __init__(
        self, spill: Spill, sizes: SegmentLayout, width: int, choice: str, lock: threading.RLock
    ) -> None:
        self._lock, self._sizes = lock, sizes
        self._index = cold.cold_index(choice)
        self._segments = Segments(spill, sizes, width, choice)
        self._busy: set[int] = set()
        self._damaged: set[int] = set()
        self._compacting: threading.Thread | None = None
        self._promised = 0

    # ---- size

    def __len__(self) -> int:
        return int(self._segments.live.sum())

    def promise(self, rows: int) -> int:
        """Keep room for ``rows`` from now on; return how many there is room for, which are fewer if the disk is full."""
        self._promised = min(rows, self._sizes.most)
        return self.room(0) + len(self)

    def room(self, more: int) -> int:
        """Return how many rows there is room for beside those that are here, after asking the disk for ``more``."""
        wanted = min(max(self._promised, len(self) + more), self._sizes.most)
        return self._segments.reserve(wanted) - len(self)

    def refusal(self) -> str | None:
        """Return why the disk gave no more room when it was asked last."""
        return self._segments.refusal

    def memory(self) -> int:
        """Return the bytes of the index."""
        return self._index.nbytes()

    def nbytes(self) -> int:
        """Return the bytes of the files."""
        return self._segments.nbytes()

    def rows(self) -> Any:
        """Return the number of rows of each slot, uint64."""
        return self._index.used()

    # ---- rows

    def there(self, keys: Any) -> Any:
        """Return whether each key has a row here."""
        return self._index.find(keys) != NOWHERE

    def read(self, keys: Any) -> Any:
        """Return the rows of keys that have one, ``(n, width)``."""
        return self._segments.read(keys, self._index.find(keys))[1]

    def copy(self, keys: Any) -> Copied:
        """Return the rows of keys that have one."""
        return self._copied(self._index.headers(keys))

    def copy_slot(self, slot: int, flagged: int = 0) -> Copied:
        """Return the rows of a slot that have any of these flags; 0: all."""
        return self._copied(self._index.list(slot, flagged))

    def _copied(self, found: Headers) -> Copied:
        counts, rows = self._segments.read(found.keys, found.places)
        return Copied(found.keys, found.last, counts, found.flags, rows, np.empty(0, np.uint64))

    def headers(self, slot: int) -> Headers:
        """Return the keys of a slot."""
        return self._index.list(slot)

    def unflag(self, slot: int, flags: int) -> None:
        """Remove flags of all rows of a slot."""
        self._index.unflag(slot, flags)

    def remove(self, keys: Any) -> Any:
        """Remove distinct keys; return those that had a row."""
        places = self._index.find(keys)
        there = places != NOWHERE
        gone = np.ascontiguousarray(keys[there])
        if len(gone):
            self._index.remove(gone)
            self._segments.drop(places[there], self._busy)
        return gone

    def put(self, rows: Copied) -> None:
        """Write rows of keys that have none here; `room` says how many may be.

        Raises:
            InfrastructureError: The disk does not take them; none is here then.
            MemoryError: There is no memory for the index; none is here then.
        """
        done = 0
        step = max(1, self._sizes.each // 2)
        try:
            while done < len(rows.keys):
                some = Copied._make(part[done : done + step] for part in rows)
                self._make_room(len(some.keys))
                places = self._segments.append(some.keys, some.counts, some.rows)
                self._segments.keep(
                    places
                )  # before the index has them: none of a segment's rows may be uncounted
                try:
                    self._index.put(Headers(some.keys, some.last, some.flags, places))
                except MemoryError:  # it has none of them
                    self._segments.drop(places, self._busy)
                    raise
                done += step
        except BaseException:  # also an interrupt: the rows must not be here and in memory
            self.remove(rows.keys)
            raise
        self._compact_in_background()

    # ---- compaction

    def _make_room(self, records: int) -> None:
        """Compact until there is room for records, and for the compaction of two segments: here, and in the background."""
        wanted = records + 2 * self._sizes.each
        self._segments.prepare(wanted)
        while self._segments.room() < wanted:
            victim = self._segments.victim(self._busy | self._damaged)
            if victim is None or not self._compact(victim):
                break
        if self._segments.room() < records:
            raise InfrastructureError(
                "The spill of an embedding table has no room: its segments cannot be compacted."
            )

    def _compact_in_background(self) -> None:
        if self._compacting is None and self._segments.low():
            thread = threading.Thread(target=self._compact_until_enough, name="spill-compaction")
            try:
                thread.start()
            except RuntimeError:  # no thread is to be had; `put` compacts where it must
                return
            self._compacting = thread

    def _compact_until_enough(self) -> None:
        try:
            while True:
                with self._lock:
                    victim = self._segments.victim(self._busy | self._damaged)
                    if victim is None or not self._segments.low():
                        return
                if not self._compact(victim):
                    return
        except InfrastructureError as error:
            logger.warning("A segment of a spill is not compacted: %s", error)
        finally:
            self._compacting = None

    def _compact(self, victim: int) -> bool:
        """Move the live records of a segment elsewhere and delete it; return False if that was not possible."""
        with self._lock:
            if victim in self._busy:
                return False
            self._busy.add(victim)
        try:
            first = 0
            while not self._is_exiting():
                with self._lock:
                    keys, counts, rows, places, damaged = self._segments.scan(victim, first, MOVED)
                    if not len(keys):
                        return True
                    live = self._index.find(keys) == places
                    if (live & damaged).any():
                        self._damaged.add(victim)
                        logger.error("Segment %d of a spill is damaged and stays as it is", victim)
                        return False
                    if live.any():
                        self._segments.prepare(int(live.sum()))
                        if self._segments.room() < live.sum():
                            return False
                        moved = np.ascontiguousarray(keys[live])
                        into = self._segments.append(moved, counts[live], rows[live])
                        self._index.move(moved, into)
                        self._segments.keep(into)
                        self._segments.drop(places[live], self._busy)
                    first += len(keys)
            return False
        finally:
            with self._lock:
                self._busy.discard(victim)
                self._segments.drop(np.empty(0, np.uint32), self._busy)  # deletes it

    def _is_exiting(self) -> bool:
        """Return whether this is the thread in the background and the process waits for it to exit."""
        return (
            threading.current_thread() is self._compacting
            and not threading.main_thread().is_alive()
        )
