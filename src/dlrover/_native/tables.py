"""Tables of rows by 64-bit keys, by the compiled library or by its twin.

A key belongs to one of `SLOTS` slots, the top bits of its hash. Keys are numpy arrays of uint64, rows arrays of
float32 ``(n, dim)``. A row has values, the states of its optimizer, the time of its last use, and the number of its
uses up to 65,535. All methods may be called from several threads; with the compiled library, reads never wait for
writes to other slots, and no reader ever sees a row that is written at the moment.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from dlrover._native import library
from dlrover._native.library import at
from dlrover._util import forks

SLOTS = 1024
MAX_DIM = 4096
COPIED = 8 << 20
"""Bytes of rows that are copied at once."""
HALF = 600
"""Time, in seconds or updates as ``now`` counts it, after which a row's uses count half: the coldest rows have least."""
KINDS = ("float32", "bfloat16", "float16")
INITIALS = ("constant", "uniform", "normal")
ADMISSIONS = ("all", "count", "bloom", "chance")
RULES = {
    "sgd": (0, False),
    "momentum": (1, False),
    "adagrad": (1, False),
    "adadelta": (2, False),
    "adam": (2, True),
    "amsgrad": (3, True),
    "radam": (2, True),
    "adabelief": (2, True),
    "lamb": (2, True),
    "agd": (2, True),
    "ftrl": (2, False),
    "group_adam": (3, True),
}
"""Optimizers by name: states of each value, and whether a row counts its updates. The order is that of the library."""


class Hyper(NamedTuple):
    """Hyperparameters of an optimizer; see `dlrover.embedding.optimizers`."""

    rate: float
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0
    decay: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    l21: float = 0.0


class RowOptions(NamedTuple):
    """What a table is made of. Names are those of the lists above."""

    dim: int
    kind: str
    rule: str
    hyper: Hyper
    seed: int = 0
    initial: str = "uniform"
    scale: float = 0.05
    """The constant, the largest uniform value, or the standard deviation."""
    admission: str = "all"
    threshold: int = 0
    """Lookups after which a key is admitted by ``count`` or ``bloom``."""
    chance: float = 1.0
    counters: int = 0
    """Bytes of the Bloom filter's counters."""
    memory_bytes: int = 0
    """Most bytes of the table; 0: no limit."""
    row_bytes: int = 0
    """Most bytes of its rows, so that the rest is for its index; 0: no limit. The twin does not know it."""

    @property
    def states(self) -> int:
        """Numbers of state for each value of a row."""
        return RULES[self.rule][0]

    @property
    def steps(self) -> bool:
        """Whether a row counts its updates."""
        return RULES[self.rule][1]

    @property
    def value_bytes(self) -> int:
        """Bytes of a row's values, rounded up to a multiple of 4."""
        return 4 * self.dim if self.kind == "float32" else (self.dim + 1) // 2 * 4

    @property
    def width(self) -> int:
        """Bytes of a row: values, then states, then the number of updates."""
        return self.value_bytes + 4 * (self.dim * self.states + self.steps)


class Copied(NamedTuple):
    """Rows of slots as they are."""

    keys: Any
    last: Any
    """Time of the last use, uint32."""
    counts: Any
    """Uses, uint16."""
    flags: Any
    """1: changed, 2: set to zero by penalties; uint16."""
    rows: Any
    """Bytes, ``(n, width)``."""
    removed: Any
    """Keys removed since the last copy of changes without ``keep``, uint64."""


class RowTable(Protocol):
    """A table; see the module."""

    def memory(self) -> int:
        """Return the bytes in use."""

    def look(self, keys: Any, out: Any, now: int, *, insert: bool, count: bool) -> Any:
        """Write rows of keys to ``out``; with ``insert`` make those that are missing, else they are zeros.

        Returns:
            Whether each key has no row now, bool.

        Raises:
            MemoryError: Some new keys found no room.
        """

    def update(self, keys: Any, gradients: Any) -> tuple[Any, Any]:
        """Apply gradients to the rows of keys; equal keys count as one with the sum.

        Returns:
            Keys without a row, each once, and their sums.
        """

    def restore(self, copied: Copied) -> None:
        """Insert rows or overwrite them, then remove the removed keys that have no row.

        Raises:
            MemoryError: Some found no room.
        """

    def remove(self, keys: Any, *, remember: bool) -> int:
        """Remove keys; return how many there were. The next copy of changes names them with ``remember``."""

    def note_removed(self, keys: Any) -> None:
        """Let the next copy of changes name keys that were removed elsewhere."""

    def clear(self, slot: int) -> None:
        """Remove everything about a slot."""

    def evict(self, slot: int, before: int, norm: float, *, blocked: bool) -> int:
        """Remove rows of a slot: used last before a time, with a smaller norm, or set to zero by penalties."""

    def copy(self, slots: Any, *, changed: bool, keep: bool) -> Copied:
        """Copy rows of slots, uint64, each of one moment: all, or with ``changed`` those changed since a copy without ``keep``."""

    def rows(self) -> Any:
        """Return the number of rows of each slot, uint64."""


class MemoryTable(RowTable, Protocol):
    """A table whose rows lie in memory."""

    def prepare(self, slots: Any, numbers: Any) -> Any:
        """Make room for more rows of slots, uint64; return whether there is too little memory for each, bool."""

    def take(self, slots: Any, numbers: Any) -> Copied:
        """Remove the coldest rows of slots, up to ``numbers`` of each, and return copies; no tombstones are kept."""

    def pack(self, slot: int) -> None:
        """Give memory that a slot does not need to all slots."""


class _Hyper(ctypes.Structure):
    _fields_: ClassVar[Any] = tuple((name, ctypes.c_float) for name in Hyper._fields)


class _Options(ctypes.Structure):
    _fields_: ClassVar[Any] = (
        *((name, ctypes.c_uint64) for name in (
            "dim", "kind", "rule", "states", "steps", "memory_bytes", "row_bytes", "seed", "initial", "admission", "threshold",
            "counters",
        )),
        ("scale", ctypes.c_float), ("chance", ctypes.c_float), ("hyper", _Hyper),
    )  # fmt: skip


class _Eviction(ctypes.Structure):
    _fields_: ClassVar[Any] = (
        ("before", ctypes.c_uint32),
        ("norm", ctypes.c_float),
        ("blocked", ctypes.c_uint32),
    )


class NativeTable:
    """RowTable in the compiled library."""

    def __init__(self, loaded: ctypes.CDLL, options: RowOptions) -> None:
        """Make a table.

        Raises:
            MemoryError: There is no memory.
        """
        self._library, self._options = loaded, options
        filled = _Options(
            options.dim, KINDS.index(options.kind), list(RULES).index(options.rule), options.states,
            options.steps, options.memory_bytes, options.row_bytes, options.seed, INITIALS.index(options.initial),
            ADMISSIONS.index(options.admission), options.threshold, options.counters, options.scale,
            options.chance, _Hyper(*options.hyper),
        )  # fmt: skip
        self._table = _functions(loaded)["new"](ctypes.byref(filled))
        if self._table is None:
            raise MemoryError("There is no memory for a table.")
        forks.wait_for(self)

    def __del__(self) -> None:
        if getattr(self, "_table", None) is not None:
            self._call("free")

    def _call(self, name: str, *arguments: Any) -> Any:
        return _functions(self._library)[name](self._table, *arguments)

    def acquire(self) -> None:
        """Keep all other threads from changing rows."""
        self._call("acquire")

    def release(self) -> None:
        """Let other threads go on."""
        self._call("release")

    def look(self, keys: Any, out: Any, now: int, *, insert: bool, count: bool) -> Any:
        """Write rows of keys to ``out``."""
        missing = np.zeros(len(keys), np.bool_)
        status = self._call("look", len(keys), at(keys), at(out), now, insert, count, at(missing))
        if status:
            raise MemoryError("Some rows found no room.")
        return missing

    def update(self, keys: Any, gradients: Any) -> tuple[Any, Any]:
        """Apply gradients."""
        distinct, sums = np.empty_like(keys), np.empty_like(gradients)
        shape = (len(keys), self._options.dim)
        sum_ = _functions(self._library)["sum"]
        number = sum_(*shape, at(keys), at(gradients), at(distinct), at(sums))
        if number == ctypes.c_size_t(-1).value:
            raise MemoryError("There is no memory for an update.")
        if number < len(keys):
            keys, gradients = distinct[:number], sums[:number]
        missing = np.zeros(len(keys), np.bool_)
        self._call("update", len(keys), at(keys), at(gradients), at(missing))
        return keys[missing], gradients[missing]

    def prepare(self, slots: Any, numbers: Any) -> Any:
        """Make room for more rows of slots."""
        failed = np.zeros(len(slots), np.bool_)
        self._call("prepare", len(slots), at(slots), at(numbers), at(failed))
        return failed

    def take(self, slots: Any, numbers: Any) -> Copied:
        """Copy the coldest rows of slots, and remove them."""
        copied = empty(int(numbers.sum()), 0, self._options.width)
        number = self._call("take", len(slots), at(slots), at(numbers), HALF, *map(at, copied[:5]))
        if number == ctypes.c_size_t(-1).value:
            raise MemoryError("There is no memory to choose rows.")
        return Copied._make([*(part[:number] for part in copied[:5]), copied.removed])

    def pack(self, slot: int) -> None:
        """Give memory that a slot does not need to all slots."""
        self._call("pack", slot)

    def restore(self, copied: Copied) -> None:
        """Insert rows or overwrite them."""
        parts = [np.ascontiguousarray(part) for part in copied[:5]]
        done = self._call("restore", len(parts[0]), *map(at, parts))
        if done < len(parts[0]):
            raise MemoryError(f"{len(parts[0]) - done} rows found no room.")
        self.remove(without_row(copied), remember=False)

    def remove(self, keys: Any, *, remember: bool) -> int:
        """Remove keys."""
        keys = np.ascontiguousarray(keys, np.uint64)
        return int(self._call("remove", len(keys), at(keys), remember))

    def note_removed(self, keys: Any) -> None:
        """Let the next copy of changes name keys that were removed elsewhere."""
        keys = np.ascontiguousarray(keys, np.uint64)
        self._call("note_removed", len(keys), at(keys))

    def clear(self, slot: int) -> None:
        """Remove everything about a slot."""
        self._call("clear", slot)

    def evict(self, slot: int, before: int, norm: float, *, blocked: bool) -> int:
        """Remove rows of a slot."""
        return int(self._call("evict", slot, ctypes.byref(_Eviction(before, norm, blocked))))

    def copy(self, slots: Any, *, changed: bool, keep: bool) -> Copied:
        """Copy rows of slots."""
        width = self._options.width
        parts = [empty(0, 0, width)]
        most = COPIED // width
        sizes = np.zeros(4, np.uint64)
        while len(slots):
            rows = max(int(sizes[2]), min(most, int(self.rows()[slots].sum())))
            copied = empty(rows, max(int(sizes[3]), SLOTS), width)
            sizes[:2] = rows, len(copied.removed)
            done = self._call(
                "export", len(slots), at(slots), changed, keep, at(sizes), *map(at, copied)
            )
            made, removed = int(sizes[0]), int(sizes[1])
            parts.append(
                Copied._make([*(part[:made] for part in copied[:5]), copied.removed[:removed]])
            )
            slots = slots[done:]
        return joined(parts)

    def rows(self) -> Any:
        """Return the number of rows of each slot, uint64."""
        rows = np.empty(SLOTS, np.uint64)
        self._call("used", at(rows))
        return rows

    def memory(self) -> int:
        """Return the bytes in use."""
        return int(self._call("memory"))


def without_row(copied: Copied) -> Any:
    """Return the removed keys of a copy that have no row in it, uint64."""
    if not len(copied.removed):  # as in a file: then the keys of rows need not be sorted
        return copied.removed
    return np.setdiff1d(copied.removed, copied.keys)


def joined(parts: Sequence[Copied]) -> Copied:
    """Return the rows of all parts."""
    return Copied._make(map(np.concatenate, zip(*parts, strict=True)))


def empty(rows: int, removed: int, width: int) -> Copied:
    """Return arrays with room for rows and removed keys, not filled."""
    return Copied(
        np.empty(rows, np.uint64),
        np.empty(rows, np.uint32),
        np.empty(rows, np.uint16),
        np.empty(rows, np.uint16),
        np.empty((rows, width), np.uint8),
        np.empty(removed, np.uint64),
    )


def values_of(options: RowOptions, rows: Any) -> Any:
    """Return the values of rows, bytes ``(n, width)``, in float32."""
    if options.kind == "float32":
        return np.ascontiguousarray(rows[:, : 4 * options.dim]).view(np.float32)
    halves = np.ascontiguousarray(rows[:, : 2 * options.dim])
    if options.kind == "float16":
        return halves.view(np.float16).astype(np.float32)
    return (halves.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def norms_of(values: Any) -> Any:
    """Return the Euclidean norm of each row in float32, summed in the order of the values, as the library does."""
    return np.sqrt(np.cumsum(values * values, axis=1, dtype=np.float32)[:, -1])


def slots_of(keys: Any) -> Any:
    """Return the slot of each key, int64."""
    hashed = keys.astype(np.uint64, copy=True)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashed ^= hashed >> np.uint64(33)
        hashed *= np.uint64(factor)
    hashed ^= hashed >> np.uint64(33)
    return (hashed >> np.uint64(54)).astype(np.int64)


_SIZE, _WORD, _PLACE, _NUMBER = ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int
_FORMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "new": (_PLACE, (_PLACE,)),
    "free": (None, (_PLACE,)),
    "look": (_NUMBER, (_PLACE, _SIZE, _PLACE, _PLACE, _WORD, _WORD, _WORD, _PLACE)),
    "sum": (_SIZE, (_SIZE, _SIZE, _PLACE, _PLACE, _PLACE, _PLACE)),
    "update": (None, (_PLACE, _SIZE, _PLACE, _PLACE, _PLACE)),
    "prepare": (None, (_PLACE, _SIZE, *(_PLACE,) * 3)),
    "take": (_SIZE, (_PLACE, _SIZE, _PLACE, _PLACE, _WORD, *(_PLACE,) * 5)),
    "pack": (None, (_PLACE, _SIZE)),
    "restore": (_SIZE, (_PLACE, _SIZE, *(_PLACE,) * 5)),
    "remove": (_SIZE, (_PLACE, _SIZE, _PLACE, _WORD)),
    "note_removed": (None, (_PLACE, _SIZE, _PLACE)),
    "clear": (None, (_PLACE, _SIZE)),
    "evict": (_SIZE, (_PLACE, _SIZE, _PLACE)),
    "export": (_SIZE, (_PLACE, _SIZE, _PLACE, _WORD, _WORD, *(_PLACE,) * 7)),
    "used": (None, (_PLACE, _PLACE)),
    "memory": (ctypes.c_uint64, (_PLACE,)),
    "acquire": (None, (_PLACE,)),
    "release": (None, (_PLACE,)),
}
"""Result and arguments of each function, whose name begins with ``dlrover_table_``."""


@functools.cache
def _functions(loaded: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    return library.functions(loaded, "dlrover_table_", _FORMS)


def table(choice: str, options: RowOptions) -> MemoryTable:
    """Return a new table for a value of ``DLROVER_NATIVE``.

    Raises:
        ImportError: see `library.use`.
    """
    loaded = library.use(choice)
    if loaded.library is not None:
        return NativeTable(loaded.library, options)
    from dlrover._native.twin_tables import TwinTable  # noqa: PLC0415 - needed without the library only

    return TwinTable(options)
