"""Tables in two tiers: the rows are those of a table in memory, whatever lies on disk, fails there or is killed."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from dlrover._native import library
from dlrover._native.cold import NativeReader
from dlrover._native.tables import (
    ADMISSIONS,
    KINDS,
    RULES,
    SLOTS,
    Hyper,
    RowOptions,
    slots_of,
)
from dlrover._native.twin_tables import TwinTable
from dlrover.embedding import Expiry, HashTable, Spill
from dlrover.embedding.tiers import segments
from dlrover.embedding.tiers.cold import ColdRows
from dlrover.embedding.tiers.table import TieredTable
from dlrover.errors import ConfigurationError, InfrastructureError
from tests.support.children import Child
from tests.waiting import until

HYPER = Hyper(0.05, 0.9, 0.99, 1e-6, 0.01, 0.001, 0.01, 0.002)
DIM = 40
MEMORY, DISK = 64 << 20, 1 << 18
needs_library = pytest.mark.skipif(
    library.load("auto").library is None, reason="the compiled library is not there"
)
CHOICES = ["off", pytest.param("require", marks=needs_library)]
KEYS = np.arange(400, dtype=np.uint64)
USED = np.unique(slots_of(KEYS))
FEW = KEYS[:120]
FEW_USED = np.unique(slots_of(FEW))


def tiered(choice: str, directory: Path, nbytes: int = DISK, **changes) -> TieredTable:
    options = {"dim": DIM, "kind": "float32", "rule": "ftrl", "hyper": HYPER}
    options |= {"threshold": 2, "chance": 0.4, "counters": SLOTS * 8}
    made = RowOptions(**(options | {"memory_bytes": MEMORY} | changes))
    return TieredTable(choice, made, Spill(directory=str(directory), nbytes=nbytes))


def demote(table: TieredTable, chance: np.random.Generator, share: float) -> None:
    """Send some rows of every slot to the disk."""
    held = table._hot.rows()
    slots = np.flatnonzero(held).astype(np.uint64)
    with table._lock:
        numbers = chance.binomial(held[slots].astype(np.int64), share)
        table._demote(slots, numbers)


def contents(table, *, changed=False, keep=True, slots=USED):
    copied = table.copy(slots.astype(np.uint64), changed=changed, keep=keep)
    order = np.argsort(copied.keys)
    return [part[order] for part in copied[:5]] + [np.sort(copied.removed)]


def same(one, other) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


class Pair(NamedTuple):
    """A table in two tiers, and a dict of rows; each operation has equal results."""

    table: TieredTable
    model: TwinTable

    def look(self, keys: np.ndarray, now: int, *, insert: bool) -> None:
        found = []
        for each in self:
            out = np.empty((len(keys), DIM), np.float32)
            missing = each.look(keys, out, now, insert=insert, count=insert)
            found.append([missing, out])
        same(*found)

    def update(self, keys: np.ndarray, gradients: np.ndarray) -> None:
        left = [np.sort(each.update(keys, gradients)[0]) for each in self]
        same(left[:1], left[1:])

    def remove(self, keys: np.ndarray, *, remember: bool) -> None:
        gone = [each.remove(keys, remember=remember) for each in self]
        assert gone[0] == gone[1]

    def evict(self, before: int, norm: float) -> None:
        for slot in FEW_USED.tolist():
            gone = [each.evict(slot, before, norm, blocked=True) for each in self]
            assert gone[0] == gone[1]

    def clear(self, slots: np.ndarray) -> None:
        for each in self:
            for slot in slots.tolist():
                each.clear(slot)

    def restore(self, slots: np.ndarray) -> None:
        copied = self.model.copy(slots, changed=False, keep=True)
        for each in self:
            each.restore(copied)

    def any(self, chance: np.random.Generator, now: int) -> None:
        keys = chance.choice(FEW, chance.integers(0, 80))
        match chance.integers(0, 11):
            case 0 | 1 | 2 | 3:
                self.look(keys, now, insert=True)
            case 4:
                self.look(keys, now, insert=False)
            case 5 | 6:
                self.update(keys, chance.normal(size=(len(keys), DIM)).astype(np.float32))
            case 7:
                self.remove(keys[:20], remember=bool(now % 2))
            case 8:
                self.evict(max(0, now - 30), 0.1 if now % 2 else 0.0)
            case 9:
                self.clear(slots_of(keys)[:3])
            case _:
                self.restore(FEW_USED[::3])


def operations(choice: str, directory: Path, seed: int, steps: int = 40) -> None:
    """Random operations on a table in two tiers, and on a dict of rows: all results and contents are equal."""
    chance = np.random.default_rng(seed)
    kind, rule = KINDS[seed % 3], list(RULES)[seed % len(RULES)]
    admission = ADMISSIONS[seed // 3 % len(ADMISSIONS)]
    table = tiered(choice, directory, kind=kind, rule=rule, admission=admission, seed=seed)
    if choice == "require" and seed % 2:
        table._cold._segments._reader = NativeReader(library.load("auto").library, ring=False)
    both = Pair(table, TwinTable(table._options._replace(memory_bytes=0)))
    for now in range(1, steps):
        both.any(chance, now)
        if chance.random() < 0.5:
            demote(table, chance, chance.choice([0.3, 1.0]))
        if chance.random() < 0.2:
            same(*(contents(t, changed=True, keep=False, slots=FEW_USED) for t in both))
        if chance.random() < 0.5:
            same(*(contents(each, slots=FEW_USED) for each in both))
        assert np.array_equal(table.rows(), both.model.rows())
        assert table.spilled()[1] <= DISK
        assert table.memory() <= MEMORY
    same(*map(contents, both))


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("seed", range(6))
def test_rows_are_those_of_a_dict(choice: str, seed: int, tmp_path: Path) -> None:
    operations(choice, tmp_path, seed)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("choice", CHOICES)
def test_rows_are_those_of_a_dict_in_many_sequences(choice: str, tmp_path: Path) -> None:
    for seed in range(6, 2000 if choice == "require" else 200):
        operations(choice, tmp_path, seed)
    assert not [*tmp_path.iterdir()], "tables that are gone leave nothing"


@pytest.mark.slow
@needs_library
def test_rows_that_are_used_most_stay_in_memory(tmp_path: Path) -> None:
    table = HashTable(
        32, memory_bytes=16 << 20, spill=Spill(directory=str(tmp_path), nbytes=64 << 20)
    )
    often = np.arange(5000)
    for _ in range(4):
        table.lookup(often)
    for first in range(10_000, 100_000, 10_000):
        table.lookup(np.arange(first, first + 10_000))
    assert table.stats().spilled_rows > 30_000
    assert not table._table._cold.there(often.astype(np.uint64)).any()


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tiered("off", tmp_path)
    out = np.empty((400, DIM), np.float32)
    table.look(KEYS, out, 1, insert=True, count=True)
    demote(table, np.random.default_rng(0), 0.3)
    before = contents(table)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(segments.os, "pwrite", full)
        with pytest.raises(InfrastructureError, match="No space left on device"):
            demote(table, np.random.default_rng(0), 1.0)
    same(contents(table), before)
    demote(table, np.random.default_rng(0), 1.0)
    same(contents(table), before)


@pytest.mark.parametrize("part", ["_segments.keep", "_index.put"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_rows_whose_way_to_the_disk_is_cut_are_in_memory_alone(
    part: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt comes after the call, a lack of memory instead of it."""
    table = tiered("off", tmp_path)
    table.look(KEYS, np.empty((400, DIM), np.float32), 1, insert=True, count=True)
    demote(table, np.random.default_rng(0), 0.3)
    before, cold = contents(table), table._cold
    owner, name = part.split(".")
    real = getattr(getattr(cold, owner), name)

    def cut(*args: object) -> None:
        if error is KeyboardInterrupt:
            real(*args)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(getattr(cold, owner), name, cut)
        with pytest.raises(error):
            demote(table, np.random.default_rng(0), 1.0)
    same(contents(table), before)
    counted = int(cold._segments.live.sum())
    assert counted == len(cold) if part == "_index.put" else counted >= len(cold)
    demote(table, np.random.default_rng(0), 1.0)
    same(contents(table), before)


def broken(table: TieredTable) -> int:
    """Return the key of the first record of the first segment."""
    return int(np.flatnonzero(table._cold._index.find(KEYS) == 0)[0])


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_damage_is_named_and_other_rows_are_read(choice: str, tmp_path: Path) -> None:
    table = tiered(choice, tmp_path)
    out = np.empty((400, DIM), np.float32)
    table.look(KEYS, out, 1, insert=True, count=True)
    demote(table, np.random.default_rng(0), 1.0)
    file = next(tmp_path.glob("*/segment-0"))
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    with pytest.raises(InfrastructureError, match="segment-0 is damaged: the record of key"):
        table.look(KEYS, out, 1, insert=False, count=False)
    whole = [i for i in range(400) if i != broken(table)]
    assert not table.look(KEYS[whole], out[:399], 1, insert=False, count=False).any()
    os.truncate(file, 30)
    with pytest.raises(InfrastructureError, match=r"cannot be read: Input/output error"):
        table.look(KEYS, out, 1, insert=False, count=False)


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_a_forked_process_leaves_the_rows_alone(choice: str, tmp_path: Path) -> None:
    """It has the same open files: what it wrote would be where the first process writes next."""
    table = tiered(choice, tmp_path)
    out = np.empty((400, DIM), np.float32)
    table.look(KEYS[:200], out[:200], 1, insert=True, count=True)
    demote(table, np.random.default_rng(0), 1.0)
    table.look(KEYS[200:], out[200:], 1, insert=True, count=True)
    files = len([*tmp_path.glob("*/segment-*")])

    def use() -> None:
        with pytest.raises(InfrastructureError, match="forked process"):
            demote(table, np.random.default_rng(0), 1.0)
        with pytest.raises(InfrastructureError, match="forked process"):
            table.look(KEYS, out, 1, insert=False, count=False)
        with pytest.raises(InfrastructureError, match="forked process"):
            table.remove(KEYS, remember=False)
        with pytest.raises(InfrastructureError, match="forked process"):
            table._cold.promise(table._cold._sizes.most)

    Child(use).result()
    assert len([*tmp_path.glob("*/segment-*")]) == files
    before = out.copy()
    demote(table, np.random.default_rng(0), 1.0)
    assert not table.look(KEYS, out, 1, insert=False, count=False).any()
    np.testing.assert_array_equal(out, before)


@pytest.mark.slow
@needs_library
def test_readers_and_updates_go_on_while_rows_move(tmp_path: Path) -> None:
    """Threads add 1 to rows that lie here and there; each addition counts once, and no row is ever missing."""
    table = tiered("require", tmp_path, rule="sgd", initial="constant", scale=0.0, hyper=Hyper(1.0))
    out = np.empty((400, DIM), np.float32)
    table.look(KEYS, out, 1, insert=True, count=True)
    ended = threading.Event()
    wrong: list[str] = []

    def push(seed: int) -> None:
        chance = np.random.default_rng(seed)
        for _ in range(60):
            left, _ = table.update(chance.permutation(KEYS), np.full((400, DIM), -1, np.float32))
            wrong.extend(["an update found no row"] * len(left))

    def read() -> None:
        rows = np.empty((400, DIM), np.float32)
        while not ended.is_set():
            if table.look(KEYS, rows, 1, insert=False, count=False).any():
                wrong.append("a reader found no row")
            if (rows != rows[:, :1]).any():
                wrong.append("a reader found half of an update")

    pushing = [threading.Thread(target=push, args=(seed,)) for seed in range(2)]
    reading = threading.Thread(target=read)
    for thread in (*pushing, reading):
        thread.start()
    chance = np.random.default_rng(9)
    while any(thread.is_alive() for thread in pushing):
        demote(table, chance, 0.5)
    ended.set()
    reading.join()
    assert not wrong
    table.look(KEYS, out, 1, insert=False, count=False)
    assert (out == 120).all()


def test_a_key_that_comes_and_goes_meanwhile_keeps_its_row(tmp_path: Path) -> None:
    """Another thread brings keys after this one has missed them; making room sends them to the disk again."""
    table, out = tiered("off", tmp_path, rule="sgd"), np.empty((400, DIM), np.float32)
    table.look(KEYS, out, 1, insert=True, count=True)
    table.update(KEYS, np.ones((400, DIM), np.float32))
    demote(table, np.random.default_rng(0), 1.0)
    before = contents(table)
    look, make_room = table._hot.look, table._make_room

    def missed(*args, **options):
        found = look(*args, **options)
        table._hot.look = look
        with table._lock:
            table._promote(KEYS)
        table._make_room = full
        return found

    def full(keys: np.ndarray) -> None:
        table._make_room = make_room
        demote(table, np.random.default_rng(0), 1.0)

    table._hot.look, table._make_room = missed, make_room
    table.look(KEYS, out, 1, insert=True, count=True)
    assert table.rows().sum() == 400
    same(contents(table)[4:], before[4:])


# ---- processes that are killed


POINTS = [
    (name, when, compaction)
    for name in ("pwrite", "posix_fallocate", "unlink")
    for when in ("before", "half", "after")
    for compaction in (False, True)
    if (when != "half" or name == "pwrite") and not (name == "posix_fallocate" and compaction)
] + [("mkdir", "after", False), ("flock", "before", False), ("flock", "after", False)]


def killed_at(point: tuple[str, str, bool], nth: int, directory: Path) -> bool:
    """Use a table in another process that is killed at its n-th time at a point; return whether it got there."""

    def use() -> None:
        _arm(point, nth)
        table = _table(directory / "spill")
        for step in range(60):
            _operate(table, step)
            if step % 10 == 9:
                table.save(directory / f"saved-{step}")

    return Child(use).end() == -signal.SIGKILL


def _table(directory: Path) -> HashTable:
    spill = Spill(directory=str(directory), nbytes=DISK)
    return HashTable(DIM, memory_bytes=MEMORY, spill=spill, expiry=Expiry(steps=20), admission=2)


def _operate(table: HashTable, step: int) -> None:
    chance = np.random.default_rng(step)
    keys = chance.choice(KEYS, 150).view(np.int64)
    rows = table.lookup(keys)
    table.update(keys, rows + 1)
    if step % 7 == 6:
        table.evict()
        table.remove(keys[:5])
    if isinstance(table._table, TieredTable):
        demote(table._table, chance, 0.7)


def _arm(point: tuple[str, str, bool], nth: int) -> None:
    name, when, only_compaction = point
    compacting, times = [0], [0]
    compact = ColdRows._compact

    def marked(self: ColdRows, victim: int) -> bool:
        compacting[0] += 1
        try:
            return compact(self, victim)
        finally:
            compacting[0] -= 1

    ColdRows._compact = marked  # type: ignore[method-assign]
    owner = {"unlink": Path, "mkdir": Path, "flock": segments.fcntl}.get(name, segments.os)
    called = getattr(owner, name)

    def reached(*args, **options):
        if "saved" in str(args[0]) or (only_compaction and not compacting[0]):
            return called(*args, **options)
        times[0] += 1
        if times[0] == nth and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if times[0] == nth and when == "half":
            called(args[0], args[1][: len(args[1]) // 2 + 1], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        result = called(*args, **options)
        if times[0] == nth and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, reached)


def check_killed(point: tuple[str, str, bool], nth: int, directory: Path) -> bool:
    """A process killed at a point leaves a checkpoint that is of one moment, and files that the next one deletes."""
    directory.mkdir()
    reached = killed_at(point, nth, directory)
    saved = sorted(directory.glob("saved-*"), key=lambda path: int(path.name[6:]))
    table = HashTable.load(saved[-1]) if saved else _table(directory / "spill")
    model = HashTable(DIM, expiry=Expiry(steps=20), admission=2)
    for step in range(int(saved[-1].name[6:]) + 1 if saved else 0):
        _operate(model, step)
    compare(table, model)
    if len(table):
        demote(table._table, np.random.default_rng(1), 1.0)
        compare(table, model)
        assert len([*(directory / "spill").iterdir()]) == 2, "one directory and its lock"
    del table
    if saved:
        assert not [*(directory / "spill").iterdir()]
    return reached


def compare(table: HashTable, model: HashTable, slots: np.ndarray = USED) -> None:
    found = [each.export_rows(slots) for each in (table, model)]
    orders = [np.argsort(each["keys"]) for each in found]
    for name in ("keys", "last", "counts", "rows"):
        same(*([each[name][order]] for each, order in zip(found, orders, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS, ids=lambda point: "-".join(map(str, point)))
def test_a_process_is_killed_at_any_point(point: tuple[str, str, bool], tmp_path: Path) -> None:
    nth = 1 if point[0] in ("mkdir", "flock") else 2 if point[2] else 20
    assert check_killed(point, nth, tmp_path / "one")


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: "-".join(map(str, point)))
def test_a_process_is_killed_at_any_time(point: tuple[str, str, bool], tmp_path: Path) -> None:
    reached = [check_killed(point, nth, tmp_path / str(nth)) for nth in range(1, 60, 3)]
    assert any(reached)


def test_a_table_that_is_gone_leaves_no_files(tmp_path: Path) -> None:
    table, other = tiered("off", tmp_path), tiered("off", tmp_path)
    for each in (table, other):
        each.look(KEYS, np.empty((400, DIM), np.float32), 1, insert=True, count=True)
        assert not [*tmp_path.glob(f"table-*{id(each)}")]
        demote(each, np.random.default_rng(0), 1.0)
    assert len([*tmp_path.glob("table-*.lock")]) == 2, "a directory that is in use stays"
    del table, each
    until(lambda: len([*tmp_path.glob("table-*.lock")]) == 1)
    open_files = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    deleted = [
        file for file in open_files if file.startswith(str(tmp_path)) and "(deleted)" in file
    ]
    assert not deleted, "they still take their room on the disk"
    before = contents(other)
    demote(other, np.random.default_rng(0), 1.0)
    same(contents(other), before)


@pytest.mark.parametrize(
    ("spill", "memory", "message"),
    [
        ("/ssd", 1 << 24, "spill is '/ssd'; a Spill or None is accepted"),
        (Spill(directory="x", nbytes=1 << 24), None, "memory_bytes is 0; with a spill, a limit is needed"),
        (Spill(directory="x", nbytes=1 << 24), 1 << 20, r"memory_bytes is 1048576; with spill.nbytes .* or more is accepted"),
        (Spill(directory="x", nbytes=1 << 10), 1 << 24, r"at `\$.spill.nbytes`"),
        (Spill(directory="x", nbytes=1 << 18), 1 << 30, "spill.nbytes is 262144; with rows of 32768 bytes, .* is accepted"),
    ],
)  # fmt: skip
def test_a_wrong_limit_is_named(spill: object, memory: int | None, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HashTable(4096 if memory == 1 << 30 else 4, memory_bytes=memory, spill=spill)
