"""A table in two tiers: the rows that are used most in memory, all others on disk.

A row lies in one tier. Reads and updates of rows in memory take no lock, as in a table without a second tier. For
keys that have no row in memory, this module takes its lock: rows come from the disk in one batch, and where memory
is short, the coldest rows of the same slots go there before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from dlrover._native import cold, tables
from dlrover._native.tables import SLOTS, Copied, RowOptions, norms_of, slots_of, values_of
from dlrover._util import forks
from dlrover.embedding.options import Spill
from dlrover.embedding.tiers import segments
from dlrover.embedding.tiers.cold import ColdRows
from dlrover.errors import ConfigurationError, NoRoomError

CHANGED, BLOCKED = 1, 2
_HEADER, _BLOCK = 16, 8
"""Bytes of a row's header, and rows that a slot gets at once."""
_FEWEST = 8
"""Places of a slot's index, at least."""
_FIXED = 1 << 18
"""Bytes of a table without rows, at most."""
_COPIES = 8
"""Shares of memory, each of a batch of rows on their way between the tiers; there are fewer copies at a time."""
_SHARE = 64
"""Part of the memory for rows that a batch has at most."""
_PART = 8
"""Part of a slot's rows that goes to the disk at once: choosing them costs a look at all."""
_CLOCK = 64
"""Slots that give rows at a time where another slot's own are not enough."""


class TieredTable:
    """RowTable with rows in memory and on disk.

    Raises:
        ConfigurationError: ``memory_bytes`` is too low for the index of what may lie on disk.
    """

    def __init__(self, choice: str, options: RowOptions, spill: Spill) -> None:
        self._options, self._spill = options, spill
        sizes = segments.layout(spill.nbytes, options.width)
        stride = (_HEADER + options.width + 7) // 8 * 8
        own = cold.index_bytes(sizes.most) + options.counters
        rest = options.memory_bytes - own
        self._buffers = rest // _SHARE * _COPIES
        rows, index = _division(rest - self._buffers - _FIXED, stride)
        least = SLOTS * _BLOCK * stride
        if rows < least:
            accepted = own + (least * 2 + _FIXED) * _SHARE // (_SHARE - _COPIES)
            raise ConfigurationError(
                f"memory_bytes is {options.memory_bytes}; with spill.nbytes {spill.nbytes} and rows of {options.width}"
                f" bytes, {accepted} or more is accepted."
            )
        self._batch = max(16, rest // _SHARE // stride)
        in_memory = rows // stride // _BLOCK * _BLOCK - (_BLOCK - 1) * SLOTS - self._batch
        self._in_memory = max(0, in_memory)
        self._lock = threading.RLock()
        forks.wait_for(self._lock)  # before that of the rows in memory, which is acquired under it
        self._hot = tables.table(
            choice, options._replace(memory_bytes=rows + index + _FIXED, row_bytes=rows)
        )
        self._cold = ColdRows(spill, sizes, options.width, choice, self._lock)
        self._hand = 0

    # ---- room in memory

    def _check_room(self, keys: Any) -> None:
        """Check that the table may get rows for distinct keys.

        It holds as many rows as there is room for however they are distributed over slots, in memory with a block of
        each slot almost empty. So a row that it has always finds room in memory, and a saved table can be loaded.

        Raises:
            NoRoomError: It may not; nothing has changed.
        """
        if self._has_room(len(keys)):
            return
        unused = np.empty((len(keys), self._options.dim), np.float32)
        missing = self._hot.look(keys, unused, 0, insert=False, count=False)
        if self._has_room(int((missing & ~self._cold.there(keys)).sum())):
            return
        refusal = self._cold.refusal()
        raise NoRoomError(
            f"An embedding table of {self.rows().sum()} rows has no room for more: memory_bytes is"
            f" {self._options.memory_bytes}, and "
            + (
                f"the spill directory {self._spill.directory} takes no more rows: {refusal}."
                if refusal
                else f"spill.nbytes is {self._spill.nbytes}."
            )
        )

    def _has_room(self, more: int) -> bool:
        """Return whether there is room for more rows; the disk gives its part, or takes back what is too much."""
        on_disk = max(0, int(self.rows().sum()) + more - self._in_memory)
        return on_disk <= self._cold.promise(on_disk)

    def _make_room(self, keys: Any) -> None:
        """Make room in memory for rows of distinct keys."""
        needs = np.bincount(slots_of(keys), minlength=SLOTS).astype(np.uint64)
        slots = np.flatnonzero(needs).astype(np.uint64)
        failed = self._hot.prepare(slots, needs[slots])
        if not failed.any():
            return
        short = slots[failed]
        held = self._hot.rows()[short]
        self._demote(short, np.minimum(held, np.maximum(needs[short], held // _PART)))
        short = short[self._hot.prepare(short, needs[short])]
        for _ in range(2 * SLOTS // _CLOCK):
            if not len(short):
                return
            others = np.arange(self._hand, self._hand + _CLOCK, dtype=np.uint64) % SLOTS
            self._hand = (self._hand + _CLOCK) % SLOTS
            held = self._hot.rows()[others]
            self._demote(others, np.minimum(held, np.maximum(_BLOCK, held // _PART)))
            for slot in others.tolist():
                self._hot.pack(slot)  # which may take back what was made room for above
            short = slots[self._hot.prepare(slots, needs[slots])]
        if len(short):
            raise NoRoomError(
                f"An embedding table has no room in memory: memory_bytes is {self._options.memory_bytes}."
            )

    def _demote(self, slots: Any, numbers: Any) -> None:
        """Move the coldest rows of slots to the disk, as long as its limit allows."""
        per = np.cumsum(numbers.astype(np.int64))
        per = np.minimum(per, self._cold.room(int(numbers.sum())))
        numbers = np.diff(per, prepend=0).astype(np.uint64)
        while len(slots):
            some = max(1, int(np.searchsorted(per, per[0] + self._batch)))
            self._demote_some(slots[:some], numbers[:some])
            slots, numbers, per = slots[some:], numbers[some:], per[some:]

    def _demote_some(self, slots: Any, numbers: Any) -> None:
        rows = self._hot.take(slots, numbers)
        try:
            self._cold.put(rows)
        except BaseException:  # also an interrupt: rows that are nowhere would be lost
            self._hot.restore(rows)
            raise

    def _promote(self, keys: Any) -> None:
        """Move rows of distinct keys from the disk to memory, where there is room."""
        if len(keys):
            self._hot.restore(self._cold.copy(keys))
            self._cold.remove(keys)

    def _batches(self, count: int) -> Iterator[slice]:
        return (slice(at, at + self._batch) for at in range(0, count, self._batch))

    # ---- rows

    def look(self, keys: Any, out: Any, now: int, *, insert: bool, count: bool) -> Any:
        """Write rows of keys to ``out``."""
        missing = self._hot.look(keys, out, now, insert=False, count=count)
        others = np.flatnonzero(missing)
        for some in self._batches(len(others)):
            at = others[some]
            wanted = keys[at]
            found = np.empty((len(at), self._options.dim), np.float32)
            with self._lock:
                if count:
                    self._fetch(wanted, insert=insert)
                    gone = self._hot.look(wanted, found, now, insert=insert, count=True)
                else:
                    gone = self._peek(wanted, found)
            out[at], missing[at] = found, gone
        return missing

    def _fetch(self, keys: Any, *, insert: bool) -> None:
        """Bring rows of keys to memory, and make room for the others if they may be inserted."""
        distinct = np.unique(keys)
        if insert:
            self._check_room(distinct)
        if insert or self._cold.there(distinct).any():
            self._make_room(
                distinct
            )  # may send one of them to the disk that another thread has just brought
            self._promote(distinct[self._cold.there(distinct)])

    def _peek(self, keys: Any, out: Any) -> Any:
        missing = self._hot.look(keys, out, 0, insert=False, count=False)
        there = self._cold.there(keys)
        if there.any():
            out[there] = values_of(self._options, self._cold.read(keys[there]))
        return missing & ~there

    def update(self, keys: Any, gradients: Any) -> tuple[Any, Any]:
        """Apply gradients."""
        keys, gradients = self._hot.update(keys, gradients)
        left = []
        for some in self._batches(len(keys)):
            with self._lock:
                self._fetch(keys[some], insert=False)
                left.append(self._hot.update(keys[some], gradients[some]))
        if not left:
            return keys, gradients
        return np.concatenate([each[0] for each in left]), np.concatenate([e[1] for e in left])

    def restore(self, copied: Copied) -> None:
        """Insert rows or overwrite them."""
        for some in self._batches(len(copied.keys)):
            part = Copied._make([*(each[some] for each in copied[:5]), copied.removed[:0]])
            with self._lock:
                distinct = np.unique(part.keys)
                self._check_room(distinct)
                self._make_room(distinct)
                self._cold.remove(distinct)
                self._hot.restore(part)
        self.remove(tables.without_row(copied), remember=False)

    def remove(self, keys: Any, *, remember: bool) -> int:
        """Remove keys."""
        keys = np.ascontiguousarray(keys, np.uint64)
        with self._lock:
            number = self._hot.remove(keys, remember=remember)
            gone = self._cold.remove(np.unique(keys))
            if remember:
                self._hot.note_removed(gone)
            self._has_room(0)
            return number + len(gone)

    def note_removed(self, keys: Any) -> None:
        """Let the next copy of changes name keys that were removed elsewhere."""
        self._hot.note_removed(keys)

    def clear(self, slot: int) -> None:
        """Remove everything about a slot."""
        with self._lock:
            self._hot.clear(slot)
            self._cold.remove(self._cold.headers(slot).keys)
            self._has_room(0)

    def evict(self, slot: int, before: int, norm: float, *, blocked: bool) -> int:
        """Remove rows of a slot."""
        with self._lock:
            number = self._hot.evict(slot, before, norm, blocked=blocked)
            found = self._cold.headers(slot)
            out = found.last < before
            if blocked:
                out |= (found.flags & BLOCKED) != 0
            if norm > 0:
                for some in self._batches(len(out)):
                    values = values_of(self._options, self._cold.read(found.keys[some]))
                    out[some] |= norms_of(values) < np.float32(norm)
            gone = self._cold.remove(np.ascontiguousarray(found.keys[out]))
            self._hot.note_removed(gone)
            self._has_room(0)
            return number + len(gone)

    def copy(self, slots: Any, *, changed: bool, keep: bool) -> Copied:
        """Copy rows of slots, with the lock for about a batch of rows at a time."""
        batches = np.cumsum(self.rows()[slots]) // np.uint64(self._batch)
        parts = [tables.empty(0, 0, self._options.width)]
        for some in np.split(slots, np.flatnonzero(np.diff(batches)) + 1):
            with self._lock:
                on_disk = some[self._cold.rows()[some] > 0].tolist()
                parts += [self._cold.copy_slot(slot, CHANGED if changed else 0) for slot in on_disk]
                parts.append(self._hot.copy(some, changed=changed, keep=keep))
                if not keep:
                    for slot in on_disk:
                        self._cold.unflag(slot, CHANGED)
        return tables.joined(parts)

    # ---- size

    def rows(self) -> Any:
        """Return the number of rows of each slot, uint64."""
        with self._lock:
            return self._hot.rows() + self._cold.rows()

    def memory(self) -> int:
        """Return the bytes in use, with those set aside for batches on their way between the tiers."""
        with self._lock:
            index = self._cold.memory()
        return self._hot.memory() + index + self._options.counters + self._buffers

    def spilled(self) -> tuple[int, int]:
        """Return the number of rows on disk, and the bytes of the files."""
        with self._lock:
            return len(self._cold), self._cold.nbytes()


def _division(nbytes: int, stride: int) -> tuple[int, int]:
    """Return bytes for rows, and for their index: 8 for each place; seven eighths of the places are used, or less than half."""
    count = max(0, nbytes - SLOTS * _FEWEST * 8) * 7 // (7 * stride + 16 * 8)
    return count * stride, max(0, nbytes - count * stride)
