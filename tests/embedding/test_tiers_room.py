"""Tables in two tiers that are short of memory: batches find room, limits hold, and the rows are those of a table in memory."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

from dlrover._native import library
from dlrover._native.tables import SLOTS, slots_of
from dlrover.embedding import Expiry, HashTable, Spill
from dlrover.embedding.tiers import segments
from dlrover.embedding.tiers.table import TieredTable
from dlrover.errors import ConfigurationError, InfrastructureError, NoRoomError
from tests.embedding.test_tiers import compare

pytestmark = pytest.mark.skipif(
    library.load("auto").library is None, reason="the compiled library is not there"
)
ALL = np.arange(SLOTS)
COUNT = 60_000
SHARES = np.arange(1, COUNT + 1) ** -1.05


@pytest.mark.slow
def test_limits_are_never_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more rows than memory holds; the disk's limit is one sentence, and nothing is lost by it.

    A table is loaded slot by slot, so that the first slots have far more rows and places than their part meanwhile.
    """
    limit = 16 << 20
    make_room = TieredTable._make_room

    def watched(table: TieredTable, keys: np.ndarray) -> None:
        make_room(table, keys)
        assert table.memory() <= limit
        assert table.spilled()[1] <= 32 << 20

    monkeypatch.setattr(TieredTable, "_make_room", watched)
    spill = Spill(directory=str(tmp_path), nbytes=32 << 20)
    table, model = (HashTable(32, memory_bytes=limit, spill=spill), HashTable(32))
    chance = np.random.default_rng(0)
    spilled = 0
    for first in range(0, 110_000, 10_000):
        keys = chance.permutation(np.concatenate([np.arange(first, first + 10_000), chance.integers(0, first + 1, 5000)]))  # fmt: skip
        gradients = chance.normal(size=(len(keys), 32)).astype(np.float32)
        assert (table.lookup(keys) == model.lookup(keys)).all()
        table.update(keys, gradients)
        model.update(keys, gradients)
        stats = table.stats()
        files = sum(f.stat().st_blocks * 512 for f in tmp_path.glob("*/*"))
        assert stats.nbytes <= limit
        assert files <= stats.spilled_bytes <= 32 << 20
        spilled = stats.spilled_rows
    assert spilled > 50_000
    table.save(tmp_path / "saved")
    loaded = HashTable.load(tmp_path / "saved")
    compare(loaded, table, ALL)
    del loaded
    fill_to_the_limit(table, model, tmp_path)


def fill_to_the_limit(table: HashTable, model: HashTable, directory: Path) -> None:
    """Insert until keys are refused: the rows that are there stay usable, also in a table that is loaded."""
    before = len(table)

    def fill() -> None:
        for first in range(1 << 20, (1 << 20) + 300_000, 10_000):
            table.lookup(np.arange(first, first + 10_000))

    with pytest.raises(
        InfrastructureError,
        match=r"has no room for more: memory_bytes is \d+, and spill.nbytes is \d+",
    ):
        fill()
    assert len(table) > before
    keys = np.arange(110_000)
    assert (table.peek(keys) == model.peek(keys)).all()
    table.save(directory / "full")
    loaded = HashTable.load(directory / "full")
    for few in np.array_split(
        np.random.default_rng(1).permutation(keys), 10
    ):  # rows that it has are no new ones
        assert (loaded.lookup(few) == model.lookup(few)).all()
    with pytest.raises(InfrastructureError, match="has no room for more"):
        loaded.lookup(np.arange(1 << 22, (1 << 22) + 10_000))
    assert (table.lookup(keys) == model.peek(keys)).all()
    del loaded
    assert table.remove(keys[:60_000]) == 60_000
    table.lookup(np.arange(1 << 21, (1 << 21) + 20_000))
    assert (table.peek(keys[60_000:]) == model.peek(keys[60_000:])).all()


class Disk:
    """A disk that has room for some segments."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.directory, self.room = directory, room
        self.real = os.posix_fallocate
        monkeypatch.setattr(segments.os, "posix_fallocate", self.allocate)

    def used(self) -> int:
        return len([*self.directory.glob("*/segment-*")])

    def allocate(self, file: int, offset: int, nbytes: int) -> None:
        if self.used() > self.room:  # the new one is among them
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.real(file, offset, nbytes)


def insert(table: HashTable, model: HashTable, keys: np.ndarray) -> bool:
    """Insert keys in both; return False if the disk refused some, which are in neither."""
    try:
        table.lookup(keys)
    except NoRoomError as error:
        if "takes no more rows: No space left on device" not in str(error):
            raise
        model.lookup(keys[np.isin(keys, table.keys())])
        return False
    model.lookup(keys)
    return True


def use(table: HashTable, model: HashTable, keys: np.ndarray, chance: np.random.Generator) -> None:
    """Bring all rows to memory and change them, in batches of many sizes."""
    shuffled = chance.permutation(keys)
    for some in np.split(shuffled, np.unique(chance.integers(0, len(keys), 12))):
        assert (table.lookup(some) == model.lookup(some)).all()
        gradients = chance.normal(size=(len(some), 32)).astype(np.float32)
        table.update(some, gradients)
        model.update(some, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 3, 5, 12, 40])
def test_rows_stay_usable_on_a_full_disk(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch, room)
    spill = Spill(directory=str(tmp_path), nbytes=32 << 20)
    expiry = Expiry(steps=1 << 20)  # its clock is the same for both
    table = HashTable(32, memory_bytes=16 << 20, spill=spill, expiry=expiry)
    model = HashTable(32, expiry=expiry)
    assert not all(insert(table, model, np.arange(n, n + 3000)) for n in range(0, 200_000, 3000))
    keys, chance = np.sort(table.keys()), np.random.default_rng(room)
    for _ in range(3):
        use(table, model, keys, chance)
    assert not insert(table, model, np.arange(1 << 20, (1 << 20) + 3000))
    compare(table, model, ALL)
    gone = keys[: len(keys) // 2]
    assert table.remove(gone) == model.remove(gone) == len(gone)
    new = np.arange(1 << 21, (1 << 21) + len(gone) - 3000)
    for some in np.array_split(new, 7):
        assert (table.lookup(some) == model.lookup(some)).all()
    use(table, model, np.concatenate([keys[len(gone) :], new]), chance)
    disk.room = 64
    assert (table.lookup(gone[:6000]) == model.lookup(gone[:6000])).all()
    compare(table, model, ALL)
    table.remove(table.keys())
    assert disk.used() <= 1, "rows that are gone leave the disk to others"


@pytest.mark.slow
@pytest.mark.parametrize("rows", [40_000, 110_000])
def test_rows_stay_usable_when_others_fill_the_disk(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch, 64)
    spill = Spill(directory=str(tmp_path), nbytes=32 << 20)
    expiry = Expiry(steps=1 << 20)  # its clock is the same for both
    table = HashTable(32, memory_bytes=16 << 20, spill=spill, expiry=expiry)
    model = HashTable(32, expiry=expiry)
    keys, chance = np.arange(rows), np.random.default_rng(rows)
    for some in np.array_split(keys, 20):
        assert (table.lookup(some) == model.lookup(some)).all()
    assert table.stats().spilled_rows > 0
    use(table, model, keys, chance)
    disk.room = 0
    for _ in range(4):
        use(table, model, keys, chance)
    compare(table, model, ALL)


class Pair:
    """A table in the least memory that is accepted, and one without limits; each operation has equal results."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.chance = np.random.default_rng(seed)
        self.directory = directory
        self.dim = int(self.chance.choice([4, 16, 64]))
        disk = 80_000 * (32 + 8 * self.dim)
        spill = Spill(directory=str(directory / "spill"), nbytes=disk)
        with pytest.raises(ConfigurationError) as refused:
            HashTable(self.dim, memory_bytes=1 << 20, spill=spill)
        self.limits = int(re.findall(r"(\d+) or more", str(refused.value))[0]), disk
        options = {"admission": 1 + seed % 2, "expiry": Expiry(steps=20)}
        self.table = HashTable(self.dim, memory_bytes=self.limits[0], spill=spill, **options)
        self.model = HashTable(self.dim, **options)
        self.names = self.chance.permutation(COUNT)
        self.slots = slots_of(self.names.astype(np.uint64))

    def keys(self) -> np.ndarray:
        """Return keys by a power law, or all of some slots, or partly new ones."""
        size = self.chance.integers(1, 9000)
        match self.chance.integers(0, 4):
            case 0:
                return self.names[:size] + COUNT // 2
            case 1:
                some = self.chance.integers(0, SLOTS, self.chance.choice([1, 30, 200]))
                return self.names[np.isin(self.slots, some)]
            case _:
                return self.chance.choice(self.names, size, p=SHARES / SHARES.sum())

    def lookup(self, keys: np.ndarray) -> None:
        assert (self.table.lookup(keys) == self.model.lookup(keys)).all()

    def update(self, keys: np.ndarray) -> None:
        gradients = self.chance.normal(size=(len(keys), self.dim)).astype(np.float32)
        self.table.update(keys, gradients)
        self.model.update(keys, gradients)

    def move(self) -> None:
        """Remove slots, and put them back."""
        some = self.chance.integers(0, SLOTS, 100)
        rows = self.model.export_rows(some)
        for each in (self.table, self.model):
            each.remove_slots(some)
            each.restore_rows(rows)

    def load(self) -> None:
        for name in ("table", "model"):  # a file has no keys that wait for admission
            getattr(self, name).save(self.directory / name)
            setattr(self, name, HashTable.load(self.directory / name))

    def any(self) -> None:
        keys = self.keys()
        match self.chance.integers(0, 12):
            case 0:
                assert self.table.remove(keys[:500]) == self.model.remove(keys[:500])
            case 1:
                assert self.table.evict() == self.model.evict()
            case 2:
                self.move()
            case 3:
                self.load()
            case 4 | 5 | 6:
                self.update(keys)
            case _:
                self.lookup(keys)
                self.update(keys)
        stats = self.table.stats()
        assert stats.nbytes <= self.limits[0]
        assert stats.spilled_bytes <= self.limits[1]
        assert stats.rows == len(self.model)
        assert (self.table.peek(keys) == self.model.peek(keys)).all()


def operations(directory: Path, seed: int, steps: int) -> None:
    """Random operations on both."""
    pair = Pair(directory, seed)
    for keys in [*np.array_split(pair.names, 7)] * 2:
        pair.lookup(keys)
    assert pair.table.stats().spilled_rows > 0.2 * COUNT
    for _ in range(steps):
        pair.any()
    compare(pair.table, pair.model, ALL)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_batches_find_room_in_the_least_memory(seed: int, tmp_path: Path) -> None:
    operations(tmp_path, seed, 12)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_many_batches_find_room_in_the_least_memory(tmp_path: Path) -> None:
    for seed in range(2, 60):
        operations(tmp_path, seed, 60)
