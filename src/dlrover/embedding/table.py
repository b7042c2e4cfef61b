"""`HashTable`: rows of numbers by any key, in the memory of this process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlrover import config
from dlrover._native import tables
from dlrover._native.tables import SLOTS, Copied
from dlrover.embedding import files, options as table_options
from dlrover.embedding.options import (
    Admission,
    CountAdmission,
    Dtype,
    Expiry,
    Initializer,
    InitializerKind,
    RowOptimizer,
    Spill,
    TableOptions,
)
from dlrover.embedding.tiers.table import TieredTable
from dlrover.errors import ConfigurationError, InfrastructureError, NoRoomError

_CHANGED = 1
HEADER = 16
"""Bytes of a row besides its numbers."""
PART = 8 << 20
ALL_SLOTS = range(SLOTS)


class TableStats(NamedTuple):
    """Size of a table."""

    rows: int
    nbytes: int
    """Bytes in use: rows, index, and what waits for admission in a Bloom filter."""
    spilled_rows: int = 0
    """Rows that lie on disk."""
    spilled_bytes: int = 0
    """Bytes of the files on disk."""


class HashTable:
    """Rows of ``dim`` numbers by 64-bit keys, with the states of their optimizer; it grows as keys come.

    Keys are arrays or tensors of int64 or uint64 ``(n,)``, or sequences of texts, which are hashed to 64 bits. Results
    are of the keys' kind: arrays, or tensors. Several threads may use a table.

    Args:
        dim: Numbers of a row, 1 to 4096.
        optimizer: Name of an optimizer with its defaults, or an `RowOptimizer`.
        learning_rate: Of an optimizer given by name.
        seed: Seed of first values and of admission by chance.
        admission: Which keys get a row: all (None), from the n-th lookup (a number), or an admission.
        expiry: Which rows `evict` removes.
        memory_bytes: Most bytes of the table.
        spill: Where rows lie that have no room in memory; None: they stay in memory.
        initializer: First values of a row.
        dtype: ``float32``, ``bfloat16`` or ``float16``, in which values are stored.

    Raises:
        ConfigurationError: A value is not accepted; it is named.
    """

    def __init__(  # noqa: PLR0913 - each is documented
        self,
        dim: int,
        *,
        optimizer: str | RowOptimizer = "adagrad",
        learning_rate: float = 0.05,
        seed: int = 0,
        admission: Admission | int | None = None,
        expiry: Expiry | None = None,
        memory_bytes: int | None = None,
        spill: Spill | None = None,
        initializer: InitializerKind | Initializer = "uniform",
        dtype: Dtype = "float32",
    ) -> None:
        if spill is not None and not isinstance(spill, Spill):
            raise ConfigurationError(f"spill is {spill!r}; a Spill or None is accepted.")
        made = TableOptions(
            dim=dim,
            optimizer=RowOptimizer(name=optimizer, learning_rate=learning_rate)
            if isinstance(optimizer, str)
            else optimizer,
            seed=seed,
            admission=CountAdmission(admission) if isinstance(admission, int) else admission,
            expiry=expiry,
            initializer=Initializer(initializer) if isinstance(initializer, str) else initializer,
            dtype=dtype,
            memory_bytes=memory_bytes or 0,
            spill=spill,
        )
        self._begin(table_options.decoded(made))

    def _begin(self, made: TableOptions) -> None:
        self.options = made
        self.dim = made.dim
        self.step = 0
        """Updates so far; expiry by steps counts them."""
        self._native = made.native()
        choice = config.native(config.environ())
        self._table: tables.RowTable = (
            tables.table(choice, self._native)
            if made.spill is None
            else TieredTable(choice, self._native, made.spill)
        )

    @classmethod
    def of(cls, made: TableOptions) -> HashTable:
        """Return an empty table with these options."""
        table = cls.__new__(cls)
        table._begin(made)  # noqa: SLF001 - of this class
        return table

    def __len__(self) -> int:
        return int(self._table.rows().sum())

    def __getstate__(self) -> object:
        raise TypeError(
            "A HashTable cannot be pickled or copied; save it, and read the file with HashTable.load."
        )

    # ---- rows

    def lookup(self, keys: Any) -> Any:
        """Return rows of keys, ``(n, dim)`` float32; a key that is admitted now gets a row, others read zeros.

        Raises:
            InfrastructureError: New rows exceed ``memory_bytes``.
        """
        return self._read(keys, insert=True, count=True)

    def peek(self, keys: Any) -> Any:
        """Return rows of keys, ``(n, dim)`` float32; missing ones read zeros. This is no use of a row."""
        return self._read(keys, insert=False, count=False)

    def _read(self, keys: Any, *, insert: bool, count: bool) -> Any:
        words = as_words(keys)
        out = np.empty((len(words), self.dim), np.float32)
        try:
            self._table.look(words, out, self.now(), insert=insert, count=count)
        except MemoryError as error:
            raise NoRoomError(
                f"An embedding table of {len(self)} rows has no room for more: memory_bytes is"
                f" {self.options.memory_bytes}."
            ) from error
        return like(out, keys)

    def update(self, keys: Any, gradients: Any, *, counts: bool = True) -> None:
        """Apply gradients ``(n, dim)`` to the rows of keys; equal keys count once, with the sum of theirs.

        Keys without a row are left out. With ``counts`` False, this is a part of the update before, for `Expiry`.
        """
        words = as_words(keys)
        given = as_gradients(gradients, (len(words), self.dim))
        self.step += counts
        self._table.update(words, given)

    def remove(self, keys: Any) -> int:
        """Remove rows of keys; return how many there were."""
        return self._table.remove(as_words(keys), remember=True)

    def evict(self) -> int:
        """Remove what has expired; return how many rows that were."""
        expiry = self.options.expiry
        if expiry is None:
            return 0
        age = expiry.seconds or expiry.steps
        before = max(0, self.now() - age + 1) if age else 0
        return sum(
            self._table.evict(slot, before, expiry.norm, blocked=expiry.zeroed)
            for slot in ALL_SLOTS
        )

    def now(self) -> int:
        """Return the time that the last use of a row is now: seconds, or updates if rows expire by them."""
        return self.step if self.options.counts_updates else int(time.time())

    @property
    def clock(self) -> int | None:
        """Updates so far, if rows expire by them."""
        return self.step if self.options.counts_updates else None

    def stats(self) -> TableStats:
        """Return the table's size."""
        spilled = self._table.spilled() if isinstance(self._table, TieredTable) else (0, 0)
        return TableStats(len(self), self._table.memory(), *spilled)

    def keys(self) -> NDArray[np.int64]:
        """Return all keys, int64, in no order."""
        return np.concatenate([np.empty(0, np.int64), *(each["keys"] for each in self._parts())])

    # ---- rows of slots, for servers and checkpoints

    def rows(self, slots: NDArray[np.intp]) -> int:
        """Return the number of rows of some slots."""
        return int(self._table.rows()[slots].sum())

    def nbytes_of(self, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the bytes of the rows of each of some slots, as `export_rows` returns them."""
        return self._table.rows()[slots] * float(self._native.width + HEADER)

    def export_rows(
        self, slots: Sequence[int] | NDArray[Any], *, changed: bool = False, keep: bool = True
    ) -> dict[str, NDArray[Any]]:
        """Return rows of slots as they are, with their states.

        Args:
            slots: Slots as `dlrover._native.tables.slots_of` returns them.
            changed: Only rows changed since the last call without ``keep``.
            keep: Whether these rows count as changed afterwards, too.
        """
        copied = self._table.copy(np.asarray(slots, np.uint64), changed=changed, keep=keep)
        found = copied._asdict()
        found["keys"], found["removed"] = copied.keys.view(np.int64), copied.removed.view(np.int64)
        return found

    def restore_rows(
        self,
        rows: Mapping[str, NDArray[Any]],
        *,
        changed: bool = False,
        clock: NDArray[np.int64] | None = None,
    ) -> None:
        """Insert what `export_rows` returned, and remove what it says was removed.

        Args:
            rows: Rows of a table with the same options.
            changed: Whether they count as changed since the last save.
            clock: For each row, the `clock` of the table that its last use was counted by; None: this one's.

        Raises:
            InfrastructureError: The rows are of another table, or exceed ``memory_bytes``.
        """
        copied = Copied._make(rows[name] for name in Copied._fields)
        keys, removed = copied.keys.view(np.uint64), copied.removed.view(np.uint64)
        if copied.rows.shape != (len(keys), self._native.width):
            raise InfrastructureError(
                f"Rows of an embedding table have {copied.rows.shape[-1]} bytes, not {self._native.width}: they are"
                " of a table with other options."
            )
        if clock is not None and self.clock is not None:  # as long ago as it was there
            last = np.clip(copied.last.astype(np.int64) + (self.clock - clock), 0, self.clock)
            copied = copied._replace(last=last.astype(np.uint32))
        flags = copied.flags | _CHANGED if changed else copied.flags & ~np.uint16(_CHANGED)
        try:
            self._table.restore(copied._replace(keys=keys, removed=removed, flags=flags))
        except MemoryError as error:
            reason = str(error).rstrip(".") or "there is no memory"
            raise NoRoomError(
                f"An embedding table cannot be restored: {reason}; memory_bytes is {self.options.memory_bytes}."
            ) from error
        if changed:
            self._table.note_removed(removed)
        if self.options.counts_updates and len(keys):  # a row's last use is never later than now
            self.step = max(self.step, int(copied.last.max()))

    def remove_slots(self, slots: Sequence[int] | NDArray[Any]) -> None:
        """Remove all rows of slots, and what is remembered of removed ones."""
        for slot in slots:
            self._table.clear(int(slot))

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole table to a file, which gets its name when it is complete.

        Raises:
            InfrastructureError: The file cannot be written.
        """
        files.write(path, self.options, self.step, self._parts())

    def _parts(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Return all rows in parts of slots, each of about `PART` bytes."""
        sizes = np.cumsum(self._table.rows()) * np.uint64(self._native.width)
        parts = (sizes // np.uint64(PART)).astype(np.int64)
        for number in np.unique(parts):
            part = self.export_rows(np.flatnonzero(parts == number))
            yield {**part, "removed": part["removed"][:0]}  # a table without them lacks nothing

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HashTable:
        """Return the table in a file.

        Raises:
            InfrastructureError: The file cannot be read, or is damaged.
        """
        found = files.read(path)
        table = cls.of(found.options)
        table.step = found.step
        for part in found.parts:
            table.restore_rows(part)
        return table


def as_words(keys: Any) -> NDArray[np.uint64]:
    """Return keys as uint64 ``(n,)``.

    Raises:
        ConfigurationError: They are neither 64-bit integers nor texts, or not in one dimension.
    """
    listed = isinstance(keys, list | tuple)
    if listed and keys and isinstance(keys[0], str | bytes):
        return np.array([xxhash.xxh3_64_intdigest(_encoded(key)) for key in keys], np.uint64)
    array = as_array(keys)
    texts = array.dtype.kind in "US" or (
        array.dtype.kind == "O" and len(array.ravel()) and isinstance(array.ravel()[0], str | bytes)
    )
    if texts and array.ndim == 1 and not listed:
        return as_words(array.tolist())
    if array.ndim != 1 or (len(array) and array.dtype not in (np.int64, np.uint64)):
        raise ConfigurationError(
            f"keys are of type {array.dtype} in {array.ndim} dimensions; int64, uint64 or text in one dimension is"
            " accepted."
        )
    whole = np.ascontiguousarray(array)
    return whole if whole.dtype == np.uint64 else whole.astype(np.int64, copy=False).view(np.uint64)


def text_keys(texts: Sequence[str | bytes] | NDArray[Any]) -> NDArray[np.int64]:
    """Return the keys, int64 ``(n,)``, that tables have texts under, for modules, whose keys are int64 tensors.

    Texts that differ in one byte of UTF-8 differ: bring them to one normal form before, where that matters.
    """
    return as_words(texts if len(texts) else np.empty(0, np.int64)).view(np.int64)


def as_gradients(gradients: Any, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return gradients as float32.

    Raises:
        ConfigurationError: They are no real numbers, or have another shape.
    """
    array = as_array(gradients)
    if array.dtype.kind not in "fiu":
        raise ConfigurationError(f"gradients are of type {array.dtype}; real numbers are accepted.")
    if array.shape != shape:
        raise ConfigurationError(f"gradients have shape {array.shape}; {shape} is accepted.")
    return np.ascontiguousarray(array, np.float32)


def as_array(values: Any) -> NDArray[Any]:
    """Return an array, or the array of a tensor."""
    if _is_tensor(values):
        own = values.detach().cpu()
        return own.float().numpy() if own.is_floating_point() else own.numpy()
    return np.asarray(values)


def _is_tensor(values: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def like(rows: NDArray[np.float32], keys: Any) -> Any:
    """Return rows as a tensor if the keys are one."""
    return sys.modules["torch"].from_numpy(rows).to(keys.device) if _is_tensor(keys) else rows


def _encoded(key: Any) -> bytes:
    try:
        return key if isinstance(key, bytes) else str.encode(key)
    except (TypeError, UnicodeEncodeError) as error:
        raise ConfigurationError(
            f"keys have {key!r} among texts; texts that UTF-8 can encode are accepted."
        ) from error
