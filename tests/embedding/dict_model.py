"""What a table is to do, written down as a plain dict of rows; and what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dlrover._native.tables import slots_of
from dlrover._native.twin_rules import RULES
from dlrover.embedding import HashTable
from dlrover.embedding.options import CountAdmission, TableOptions
from dlrover.embedding.table import as_words


@dataclass
class Row:
    """One row. Values are what is stored, in float32."""

    values: np.ndarray
    states: np.ndarray
    updates: int = 0
    last: int = 0
    uses: int = 0
    zeroed: bool = False


class SavedRow(NamedTuple):
    """A row as a checkpoint holds it: values, states and the number of updates in bytes."""

    data: bytes
    last: int
    uses: int
    zeroed: bool


class SavedModel(NamedTuple):
    """Everything at the moment of a save."""

    rows: dict[int, SavedRow]
    changed: set[int]
    removed: set[int]
    steps: dict[int, int]
    clocks: np.ndarray
    """Updates that the server of each slot has had."""


@dataclass
class DictModel:
    """A table on servers as a dict. Keys are 64-bit words, as `as_words` makes them.

    Args:
        options: Of the table.
        owners: The server of each slot.
    """

    options: TableOptions
    owners: np.ndarray
    rows: dict[int, Row] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    """Lookups of keys that had no row."""
    changed: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    steps: dict[int, int] = field(default_factory=dict)
    """Updates that each server has had."""
    clock: int = 1000

    def __post_init__(self) -> None:
        o = self.options
        self._native = o.native()
        made = TableOptions(dim=o.dim, optimizer=o.optimizer, seed=o.seed, initializer=o.initializer, dtype=o.dtype)  # fmt: skip
        self._first = HashTable.of(made)

    def _servers(self, words: np.ndarray) -> np.ndarray:
        return self.owners[slots_of(words)]

    def now(self, server: int) -> int:
        """Return the time by which rows of a server expire."""
        expiry = self.options.expiry
        steps = expiry is not None and expiry.steps
        return self.steps.get(server, 0) if steps else self.clock

    def lookup(self, words: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Return the rows of keys; where admission is by chance or by a filter, ``found`` says who was admitted."""
        expected = np.zeros_like(found)
        firsts = self._first.lookup(words) if len(words) else found
        servers = self._servers(words).tolist()
        for i, (key, server) in enumerate(zip(words.tolist(), servers, strict=True)):
            row = self.rows.get(key)
            if row is None and self._admitted(key, bool(found[i].any())):
                states = np.zeros((self._native.states, self.options.dim), np.float32)
                row = self.rows[key] = Row(firsts[i].copy(), states)
                self.changed.add(key)
            if row is not None:
                row.last, row.uses = self.now(server), min(65535, row.uses + 1)
                expected[i] = row.values
        return expected

    def _admitted(self, key: int, seen: bool) -> bool:
        admission = self.options.admission
        if admission is None:
            return True
        self.waiting[key] = self.waiting.get(key, 0) + 1
        enough = self.waiting[key] >= getattr(admission, "lookups", np.inf)
        return enough if isinstance(admission, CountAdmission) else enough or seen

    def peek(self, words: np.ndarray) -> np.ndarray:
        """Return the rows of keys."""
        nothing = np.zeros(self.options.dim, np.float32)
        found = [self.rows[key].values if key in self.rows else nothing for key in words.tolist()]
        return np.array(found, np.float32).reshape(len(words), self.options.dim)

    def update(self, words: np.ndarray, gradients: np.ndarray) -> None:
        """Apply gradients, with the sum for equal keys."""
        for server in np.unique(self._servers(words)).tolist():
            self.steps[server] = self.steps.get(server, 0) + 1
        sums: dict[int, np.ndarray] = {}
        for key, gradient in zip(words.tolist(), gradients, strict=True):
            sums[key] = sums[key] + gradient if key in sums else gradient
        keys = [key for key in sums if key in self.rows]
        if not keys:
            return
        rows = [self.rows[key] for key in keys]
        values, states = np.stack([r.values for r in rows]), np.stack([r.states for r in rows])
        updates = np.array([row.updates + 1 for row in rows])
        total = np.stack([sums[key] for key in keys])
        zeroed = RULES[self._native.rule](self._native.hyper, values, states, total, updates)
        stored = rounded(values, self.options.dtype)
        for i, row in enumerate(rows):
            row.values, row.states, row.updates = stored[i], states[i], int(updates[i])
            row.zeroed = zeroed is not None and bool(zeroed[i])
        self.changed.update(keys)

    def remove(self, words: Iterable[int]) -> int:
        """Remove keys; return how many there were."""
        gone = [key for key in words if self.rows.pop(key, None) is not None]
        self.removed.update(gone)
        self.changed.difference_update(gone)
        return len(gone)

    def evict(self) -> int:
        """Remove what has expired."""
        expiry = self.options.expiry
        if expiry is None or not self.rows:
            return 0
        keys = [*self.rows]
        servers = self._servers(np.array(keys, np.uint64)).tolist()
        age = expiry.seconds or expiry.steps

        def expired(row: Row, server: int) -> bool:
            norm = np.sqrt(np.cumsum(row.values * row.values, dtype=np.float32)[-1])
            late = bool(age) and row.last <= self.now(server) - age
            return late or norm < np.float32(expiry.norm) or (expiry.zeroed and row.zeroed)

        return self.remove(
            [key for key, server in zip(keys, servers, strict=True) if expired(self.rows[key], server)]
        )  # fmt: skip

    # ---- checkpoints

    def saved(self) -> SavedModel:
        """Return everything; nothing counts as changed afterwards."""
        clocks = np.array([self.steps.get(owner, 0) for owner in self.owners.tolist()])
        made = SavedModel(self.saved_rows(), self.changed, self.removed, dict(self.steps), clocks)
        self.changed, self.removed = set(), set()
        return made

    def saved_rows(self) -> dict[int, SavedRow]:
        """Return the rows as a full checkpoint holds them."""
        return {
            key: SavedRow(self._bytes(row), row.last, row.uses, row.zeroed)
            for key, row in self.rows.items()
        }

    def forget_waiting(self, slots: np.ndarray) -> None:
        """Forget lookups of keys of some slots that had no row."""
        keys = np.array([*self.waiting], np.uint64)
        for key in keys[np.isin(slots_of(keys), slots)].tolist():
            del self.waiting[key]

    def restore(self, rows: Mapping[int, SavedRow], clocks: np.ndarray) -> None:
        """Have the rows of a checkpoint, and nothing else: all servers go on from one number of updates."""
        self.rows = {key: self._row(row) for key, row in rows.items()}
        self.waiting, self.changed, self.removed = {}, set(), set()
        if self.options.counts_updates:
            self.steps = dict.fromkeys(self.owners.tolist(), int(clocks.max()))
            slots = slots_of(np.array([*rows], np.uint64))
            for row, clock in zip(self.rows.values(), clocks[slots].tolist(), strict=True):
                row.last += int(clocks.max()) - clock

    def _bytes(self, row: Row) -> bytes:
        o = self._native
        values = packed(row.values, o.kind).ljust(o.value_bytes, b"\0")
        return (
            values + row.states.tobytes() + (np.float32(row.updates).tobytes() if o.steps else b"")
        )

    def _row(self, saved: SavedRow) -> Row:
        o = self._native
        halves = np.frombuffer(saved.data, np.uint8)
        numbers = halves[o.value_bytes :].view(np.float32)
        kind = {"float32": np.float32, "float16": np.float16}.get(o.kind, np.uint16)
        raw = halves[: np.dtype(kind).itemsize * o.dim].view(kind)
        values = (raw.astype(np.uint32) << 16).view(np.float32) if o.kind == "bfloat16" else raw
        states = numbers[: o.states * o.dim].reshape(o.states, o.dim).copy()
        updates = int(numbers[-1]) if o.steps else 0
        return Row(values.astype(np.float32), states, updates, saved.last, saved.uses, saved.zeroed)


def added(before: Mapping[int, SavedRow], increment: SavedModel) -> dict[int, SavedRow]:
    """Return the rows of a checkpoint with an increment: of a row that was only looked up, it says nothing."""
    kept = {key: row for key, row in before.items() if key not in increment.removed}
    return kept | {key: increment.rows[key] for key in increment.changed}


def exported(tables: Iterable[HashTable], slots: Iterable[np.ndarray]) -> dict[int, SavedRow]:
    """Return the rows that tables hold of some slots."""
    found: dict[int, SavedRow] = {}
    for table, some in zip(tables, slots, strict=True):
        rows = table.export_rows(some)
        fields = (rows["last"], rows["counts"], rows["flags"])
        for key, data, *numbers in zip(as_words(rows["keys"]).tolist(), rows["rows"], *fields, strict=True):  # fmt: skip
            last, uses, flags = map(int, numbers)
            assert key not in found
            found[key] = SavedRow(data.tobytes(), last, uses, bool(flags & 2))
    return found


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """Return values as they are once they have been stored."""
    if kind == "float16":
        return values.astype(np.float16).astype(np.float32)
    return (_brain(values) << 16).view(np.float32) if kind == "bfloat16" else values


def packed(values: np.ndarray, kind: str) -> bytes:
    """Return stored values in bytes."""
    if kind == "float16":
        return values.astype(np.float16).tobytes()
    return _brain(values).astype(np.uint16).tobytes() if kind == "bfloat16" else values.tobytes()


def _brain(values: np.ndarray) -> np.ndarray:
    """Return the upper halves of numbers, rounded to the nearest, ties to even."""
    words = np.ascontiguousarray(values).view(np.uint32)
    return (words + 0x7FFF + (words >> 16 & 1)) >> 16
