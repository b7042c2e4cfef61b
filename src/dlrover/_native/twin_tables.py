"""Twin of ``native/table.cpp`` in numpy, with a dict as the index."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from dlrover._native.tables import (
    HALF,
    SLOTS,
    Copied,
    RowOptions,
    empty,
    joined,
    norms_of,
    slots_of,
    values_of,
    without_row,
)
from dlrover._native.twin_rules import RULES
from dlrover._util import forks

CHANGED, BLOCKED = 1, 2
HEADER = 16
"""Bytes of a row's header in the library, which count as memory here, too."""
U64 = np.uint64


class TwinTable:
    """RowTable in numpy."""

    def __init__(self, options: RowOptions) -> None:
        self._options = options
        self._lock = threading.RLock()
        forks.wait_for(self._lock)
        self._places: list[dict[int, int]] = [{} for _ in range(SLOTS)]
        self._waiting: list[dict[int, int]] = [{} for _ in range(SLOTS)]
        self._removed: list[list[int]] = [[] for _ in range(SLOTS)]
        self._draws = np.zeros(SLOTS, U64)
        self._counters = np.zeros(options.counters, np.uint8)
        self._free: list[int] = []
        self._count = 0
        self._keys: Any = np.empty(0, U64)
        self._last: Any = np.empty(0, np.uint32)
        self._counts: Any = np.empty(0, np.uint16)
        self._flags: Any = np.empty(0, np.uint16)
        self._rows: Any = np.empty((0, options.width), np.uint8)

    def _grow(self, room: int) -> None:
        more = room - len(self._keys)
        self._keys = np.concatenate([self._keys, np.zeros(more, U64)])
        self._last = np.concatenate([self._last, np.zeros(more, np.uint32)])
        self._counts = np.concatenate([self._counts, np.zeros(more, np.uint16)])
        self._flags = np.concatenate([self._flags, np.zeros(more, np.uint16)])
        rows = np.zeros((more, self._options.width), np.uint8)
        self._rows = np.concatenate([self._rows, rows])

    # ---- values

    def _values(self, places: Any) -> Any:
        """Return values of rows in float32."""
        return values_of(self._options, self._rows[places])

    def _store(self, places: Any, values: Any) -> None:
        o = self._options
        if o.kind == "float32":
            stored = np.ascontiguousarray(values)
        elif o.kind == "float16":
            with np.errstate(over="ignore"):
                stored = values.astype(np.float16)
        else:
            stored = _to_brain(np.ascontiguousarray(values))
        raw = stored.view(np.uint8).reshape(len(values), -1)
        self._rows[places, : raw.shape[1]] = raw

    # ---- lookups

    def look(self, keys: Any, out: Any, now: int, *, insert: bool, count: bool) -> Any:
        """Write rows of keys to ``out``."""
        full = False
        missing = np.zeros(len(keys), np.bool_)
        with self._lock:
            for i, (key, slot) in enumerate(
                zip(keys.tolist(), slots_of(keys).tolist(), strict=True)
            ):
                place = self._places[slot].get(key)
                if place is None and insert and self._admitted(slot, key):
                    place = self._insert(slot, key)
                    full = full or place is None
                    if place is not None:
                        self._store([place], self._initial(key)[None])
                if place is None:
                    out[i] = 0
                    missing[i] = True
                    continue
                if count:
                    self._last[place] = now
                    self._counts[place] = min(65535, int(self._counts[place]) + 1)
                out[i] = self._values([place])[0]
        if full:
            raise MemoryError("Some rows found no room.")
        return missing

    def _insert(self, slot: int, key: int) -> int | None:
        o = self._options
        if o.memory_bytes and (int(self.rows().sum()) + 1) * (o.width + HEADER) > o.memory_bytes:
            return None
        place = self._free.pop() if self._free else self._count
        self._count = max(self._count, place + 1)
        if place == len(self._keys):
            self._grow(max(16, 2 * place))
        self._keys[place], self._last[place], self._counts[place] = key, 0, 0
        self._flags[place] = CHANGED
        self._rows[place] = 0
        self._places[slot][key] = place
        return place

    def _initial(self, key: int) -> Any:
        o = self._options
        if o.initial == "constant":
            return np.full(o.dim, o.scale, np.float32)
        hashed = _mixed(key ^ _mixed(o.seed))
        low, high = np.uint32(hashed & 0xFFFFFFFF), np.uint32(hashed >> 32)
        index = np.arange(o.dim, dtype=np.uint32)
        one = _draw(low ^ _draw(high, index), index)
        if o.initial == "uniform":
            unit = (one >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
            return unit * np.float32(o.scale)
        two = _draw(one, high)
        halves = np.uint32(0xFFFF)
        total = (one & halves) + (one >> np.uint32(16)) + (two & halves) + (two >> np.uint32(16))
        centred = (total.astype(np.int64) - 131070).astype(np.float32)
        return centred * np.float32(2.6429e-5) * np.float32(o.scale)

    def _admitted(self, slot: int, key: int) -> bool:
        o = self._options
        if o.admission == "all":
            return True
        hashed = _mixed(key)
        if o.admission == "chance":
            self._draws[slot] += U64(1)
            drawn = _mixed(hashed ^ _mixed(o.seed + int(self._draws[slot])))
            return bool(np.float32(drawn >> 40) * np.float32(2.0**-24) < np.float32(o.chance))
        if o.admission == "count":
            self._waiting[slot][key] = self._waiting[slot].get(key, 0) + 1
            return self._waiting[slot][key] >= o.threshold
        each, least, following = o.counters // SLOTS, 1 << 32, hashed
        for _ in range(4):
            following = _mixed(following + 0x9E3779B97F4A7C15)
            at = slot * each + following % each
            self._counters[at] = min(255, int(self._counters[at]) + 1)
            least = min(least, int(self._counters[at]))
        return least >= o.threshold

    # ---- changes

    def update(self, keys: Any, gradients: Any) -> tuple[Any, Any]:
        """Apply gradients."""
        o = self._options
        distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        sums = np.zeros((len(distinct), o.dim), np.float32)
        sums[np.arange(len(distinct))] = gradients[first]
        later = np.ones(len(keys), np.bool_)
        later[first] = False
        np.add.at(sums, inverse[later], gradients[later])
        with self._lock:
            places = self._find(distinct)
            there = places >= 0
            if there.any():
                self._apply(places[there], sums[there])
        return distinct[~there], sums[~there]

    def prepare(self, slots: Any, numbers: Any) -> Any:
        """Make room for more rows of slots."""
        o = self._options
        with self._lock:
            wanted = (int(self.rows().sum()) + int(numbers.sum())) * (o.width + HEADER)
        return np.full(len(slots), bool(o.memory_bytes) and wanted > o.memory_bytes) & (numbers > 0)

    def take(self, slots: Any, numbers: Any) -> Copied:
        """Copy the coldest rows of slots, and remove them."""
        with self._lock:
            chosen: list[int] = []
            for slot, number in zip(slots.tolist(), numbers.tolist(), strict=True):
                own = self._places[slot]
                chosen += sorted(own.values(), key=self._warmth)[:number]
            places = np.array(chosen, np.int64)
            parts = (self._keys, self._last, self._counts, self._flags, self._rows)
            copied = Copied._make([*(part[places] for part in parts), np.empty(0, U64)])
            for key, slot in zip(copied.keys.tolist(), slots_of(copied.keys).tolist(), strict=True):
                self._remove(slot, key, remember=False)
            return copied

    def _warmth(self, place: int) -> tuple[int, int]:
        bits = int(self._counts[place]).bit_length()
        return bits * HALF + int(self._last[place]), int(self._keys[place])

    def pack(self, slot: int) -> None:
        """Give memory that a slot does not need to all slots: here, it belongs to all."""

    def _apply(self, places: Any, gradients: Any) -> None:
        o = self._options
        values = self._values(places).copy()
        end = o.width - 4 * o.steps
        raw = np.ascontiguousarray(self._rows[places, o.value_bytes : end])
        states = raw.view(np.float32).reshape(len(places), o.states, o.dim)
        steps = np.ones(len(places), np.float32)
        if o.steps:
            steps += np.ascontiguousarray(self._rows[places, end:]).view(np.float32)[:, 0]
            self._rows[places, end:] = steps[:, None].view(np.uint8)
        blocked = RULES[o.rule](o.hyper, values, states, gradients, steps.astype(np.int64))
        self._store(places, values)
        self._rows[places, o.value_bytes : end] = states.reshape(len(places), -1).view(np.uint8)
        flags = (self._flags[places] | CHANGED) & ~np.uint16(BLOCKED)
        if blocked is not None:
            flags = np.where(blocked, flags | BLOCKED, flags).astype(np.uint16)
        self._flags[places] = flags

    def _find(self, keys: Any) -> Any:
        """Return the place of each key; -1 for a missing one."""
        slots = slots_of(keys).tolist()
        found = [
            self._places[slot].get(key, -1) for key, slot in zip(keys.tolist(), slots, strict=True)
        ]
        return np.array(found, np.int64)

    def restore(self, copied: Copied) -> None:
        """Insert rows or overwrite them."""
        with self._lock:
            for i, (key, slot) in enumerate(
                zip(copied.keys.tolist(), slots_of(copied.keys).tolist(), strict=True)
            ):
                place = self._places[slot].get(key)
                place = self._insert(slot, key) if place is None else place
                if place is None:
                    raise MemoryError(f"{len(copied.keys) - i} rows found no room.")
                self._last[place], self._counts[place] = copied.last[i], copied.counts[i]
                self._flags[place] = copied.flags[i]
                self._rows[place] = copied.rows[i]
        self.remove(without_row(copied), remember=False)

    def remove(self, keys: Any, *, remember: bool) -> int:
        """Remove keys."""
        keys = np.asarray(keys, U64)
        with self._lock:
            pairs = zip(keys.tolist(), slots_of(keys).tolist(), strict=True)
            return sum(self._remove(slot, key, remember=remember) for key, slot in pairs)

    def _remove(self, slot: int, key: int, *, remember: bool) -> bool:
        place = self._places[slot].pop(key, None)
        if place is None:
            return False
        self._free.append(place)
        if remember:
            self._removed[slot].append(key)
        return True

    def note_removed(self, keys: Any) -> None:
        """Let the next copy of changes name keys that were removed elsewhere."""
        with self._lock:
            for key, slot in zip(keys.tolist(), slots_of(keys).tolist(), strict=True):
                self._removed[slot].append(key)

    def clear(self, slot: int) -> None:
        """Remove everything about a slot."""
        with self._lock:
            self._free += self._places[slot].values()
            self._places[slot], self._waiting[slot], self._removed[slot] = {}, {}, []

    def evict(self, slot: int, before: int, norm: float, *, blocked: bool) -> int:
        """Remove rows of a slot."""
        with self._lock:
            places = np.array([*self._places[slot].values()], np.int64)
            if not len(places):
                return 0
            out = self._last[places] < before
            if blocked:
                out |= (self._flags[places] & BLOCKED) != 0
            if norm > 0:
                out |= norms_of(self._values(places)) < np.float32(norm)
            gone = self._keys[places[out]].tolist()
            return sum(self._remove(slot, key, remember=True) for key in gone)

    def copy(self, slots: Any, *, changed: bool, keep: bool) -> Copied:
        """Copy rows of slots."""
        parts = [self._copy(slot, changed=changed, keep=keep) for slot in slots.tolist()]
        return joined([empty(0, 0, self._options.width), *parts])

    def _copy(self, slot: int, *, changed: bool, keep: bool) -> Copied:
        with self._lock:
            places = np.array([*self._places[slot].values()], np.int64)
            if changed:
                places = places[(self._flags[places] & CHANGED) != 0]
            parts = (self._keys, self._last, self._counts, self._flags, self._rows)
            removed = np.array(self._removed[slot], U64)
            copied = Copied._make([*(part[places] for part in parts), removed])
            if not keep:
                self._flags[places] &= ~np.uint16(CHANGED)
                self._removed[slot] = []
            return copied

    def rows(self) -> Any:
        """Return the number of rows of each slot, uint64."""
        return np.array([len(places) for places in self._places], np.uint64)

    def memory(self) -> int:
        """Return the bytes in use."""
        return int(self._rows.nbytes + HEADER * len(self._keys))


def _mixed(key: int) -> int:
    key &= (1 << 64) - 1
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        key = ((key ^ key >> 33) * factor) & ((1 << 64) - 1)
    return key ^ key >> 33


def _draw(key: Any, index: Any) -> Any:
    with np.errstate(over="ignore"):
        value = key ^ index
        value = (value ^ (value >> np.uint32(16))) * np.uint32(0x7FEB352D)
        value = (value ^ (value >> np.uint32(15))) * np.uint32(0x846CA68B)
        return value ^ (value >> np.uint32(16))


def _to_brain(values: Any) -> Any:
    word = values.view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    bad = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(bad, (word >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)
