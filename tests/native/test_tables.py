"""Tables of rows: the compiled library and its twin hold the same bytes after the same operations."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from dlrover._native import library, tables
from dlrover._native.tables import (
    ADMISSIONS,
    INITIALS,
    KINDS,
    RULES,
    SLOTS,
    Hyper,
    NativeTable,
    RowOptions,
    slots_of,
)
from dlrover._native.twin_tables import TwinTable
from tests.waiting import until

HYPER = Hyper(0.05, 0.9, 0.99, 1e-6, 0.01, 0.001, 0.01, 0.002)
loaded = library.load("auto").library
needs_library = pytest.mark.skipif(loaded is None, reason="the compiled library is not there")


def both(**changes):
    options = RowOptions(
        **({"dim": 5, "kind": "float32", "rule": "adagrad", "hyper": HYPER} | changes)
    )
    return NativeTable(loaded, options), TwinTable(options)


def rows(table, keys, dim, *, insert=True, now=1, count=True):
    out = np.full((len(keys), dim), np.nan, np.float32)
    table.look(keys, out, now, insert=insert, count=count)
    return out


def contents(table, *, changed=False, keep=True, slots=range(SLOTS)):
    copied = table.copy(np.array(slots, np.uint64), changed=changed, keep=keep)
    order = np.argsort(copied.keys)
    return [part[order] for part in copied[:5]] + [np.sort(copied.removed)]


def same(one, other) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@needs_library
@pytest.mark.parametrize("rule", RULES)
def test_every_optimizer_gives_the_same_bits(rule: str) -> None:
    chance = np.random.default_rng(1)
    native, twin = both(rule=rule, dim=7)
    for step in range(12):
        keys = chance.integers(0, 60, 40).astype(np.uint64)
        same([rows(native, keys, 7, now=step)], [rows(twin, keys, 7, now=step)])
        gradients = chance.normal(size=(40, 7)).astype(np.float32) / (1 + step)
        native.update(keys, gradients)
        twin.update(keys, gradients)
    same(contents(native), contents(twin))


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("initial", INITIALS)
def test_every_type_and_initializer_gives_the_same_bits(kind: str, initial: str) -> None:
    chance = np.random.default_rng(2)
    native, twin = both(kind=kind, initial=initial, scale=0.3, rule="sgd")
    keys = chance.integers(0, 2**64, 300, dtype=np.uint64)
    same([rows(native, keys, 5)], [rows(twin, keys, 5)])
    gradients = chance.choice([0, 1e-8, 1e-5, 1, 1e3, 1e6, np.inf, np.nan], (300, 5)).astype(
        np.float32
    )
    native.update(keys, gradients)
    twin.update(keys, gradients)
    same([rows(native, keys, 5)], [rows(twin, keys, 5)])


@needs_library
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_give_the_same_bits(admission: str, seed: int) -> None:
    chance = np.random.default_rng(seed)
    native, twin = both(
        admission=admission, threshold=3, chance=0.4, counters=SLOTS * 8, seed=seed, rule="ftrl",
        kind=KINDS[seed % 3],
    )  # fmt: skip
    slots = np.unique(slots_of(np.arange(100, dtype=np.uint64))).tolist()
    for now in range(60):
        keys = chance.integers(0, 100, chance.integers(0, 50)).astype(np.uint64)
        match chance.integers(0, 9):
            case 0 | 1 | 2:
                same([rows(native, keys, 5, now=now)], [rows(twin, keys, 5, now=now)])
            case 3:
                found = [
                    rows(table, keys, 5, insert=False, count=False) for table in (native, twin)
                ]
                same(found[:1], found[1:])
            case 4 | 5:
                gradients = chance.normal(size=(len(keys), 5)).astype(np.float32)
                native.update(keys, gradients)
                twin.update(keys, gradients)
            case 6:
                remember = bool(now % 2)
                assert native.remove(keys, remember=remember) == twin.remove(
                    keys, remember=remember
                )
            case 7:
                for slot in slots:
                    gone = [
                        t.evict(slot, now - 20 if now > 20 else 0, 0.01, blocked=True)
                        for t in (native, twin)
                    ]
                    assert gone[0] == gone[1]
            case _:
                for slot in slots_of(keys)[:3].tolist():
                    native.clear(slot)
                    twin.clear(slot)
        if chance.random() < 0.2:
            taken = [contents(t, changed=True, keep=False, slots=slots) for t in (native, twin)]
            same(*taken)
        same(contents(native, slots=slots), contents(twin, slots=slots))
        assert np.array_equal(native.rows(), twin.rows())


@pytest.mark.parametrize("kind", [pytest.param("native", marks=needs_library), "twin"])
def test_a_table_restored_from_copies_is_the_same(kind: str) -> None:
    made = both() if loaded is not None else (None, None)
    table = made[0] if kind == "native" else TwinTable(RowOptions(5, "float32", "adagrad", HYPER))
    other = both()[0] if kind == "native" else TwinTable(RowOptions(5, "float32", "adagrad", HYPER))
    keys = np.arange(3000, dtype=np.uint64)
    rows(table, keys, 5)
    table.update(keys, np.ones((3000, 5), np.float32))
    table.remove(keys[:100], remember=True)
    rows(other, keys[:50], 5)
    other.restore(table.copy(np.arange(SLOTS, dtype=np.uint64), changed=False, keep=True))
    same(contents(table)[:5], contents(other)[:5])
    assert len(contents(table, changed=True, keep=False)[0]) == 2900
    assert [len(part) for part in contents(table, changed=True)] == [0] * 6
    table.update(keys[100:110], np.ones((10, 5), np.float32))
    assert len(contents(table, changed=True)[0]) == 10


@needs_library
def test_more_rows_than_are_copied_at_once_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COPIED", 4000)
    native, twin = both()
    keys = np.arange(3000, dtype=np.uint64)
    for table in (native, twin):
        rows(table, keys, 5)
        table.remove(keys[:2500:2], remember=True)
    same(contents(native), contents(twin))
    same(contents(native, changed=True, keep=False), contents(twin, changed=True, keep=False))
    same(contents(native, changed=True), contents(twin, changed=True))


@needs_library
def test_lookups_find_the_pages_of_new_rows_there() -> None:
    """Once a table has some size, another thread touches the memory that follows."""
    table = NativeTable(loaded, RowOptions(256, "float32", "sgd", HYPER))
    rows(table, np.arange(100_000, dtype=np.uint64), 256)
    more = iter(np.arange(100_000, 1_000_000, dtype=np.uint64).reshape(-1, 1000))

    def ahead() -> bool:
        rows(table, next(more), 256)
        return _largest_resident() > table.memory() + (1 << 20)

    until(ahead, 30, "memory ahead")


@pytest.mark.slow
@needs_library
def test_an_index_that_a_slot_has_given_up_takes_no_memory() -> None:
    """Of a million keys, few slots have so few that their indices have half of the places of the others."""
    table = NativeTable(loaded, RowOptions(1, "float32", "sgd", HYPER))
    keys = np.arange(1_000_000, dtype=np.uint64)
    before = _resident()
    for part in np.split(keys, 100):
        rows(table, part, 1)
    assert _resident() - before < table.memory() + (7 << 20)


def _resident() -> int:
    """Return the bytes of this process in memory that are no pages of files."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def _largest_resident() -> int:
    """Return the resident bytes of the mapping that has most."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return max(int(line.split()[1]) for line in lines if line.startswith("Rss:")) << 10


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("native", marks=needs_library),
        pytest.param("twin", marks=pytest.mark.slow),
    ],
)
def test_a_limit_of_memory_is_kept(kind: str) -> None:
    options = RowOptions(64, "float32", "sgd", HYPER, memory_bytes=4 << 20)
    table = NativeTable(loaded, options) if kind == "native" else TwinTable(options)
    keys = np.arange(20_000, dtype=np.uint64)
    with pytest.raises(MemoryError, match="Some rows found no room"):
        rows(table, keys, 64)
    assert 1000 < table.rows().sum() < (4 << 20) / 256
    some = next(iter(np.split(keys, 50)))
    table.remove(keys, remember=False)
    rows(table, some[:100], 64)
    assert table.rows().sum() == 100


@pytest.mark.slow
@needs_library
def test_the_coldest_rows_are_taken_and_memory_is_given_to_other_slots() -> None:
    chance = np.random.default_rng(3)
    native, twin = both()
    keys = np.arange(12_000, dtype=np.uint64)
    for now in range(1, 2000, 700):
        some = chance.choice(keys, 6000)
        same([rows(native, some, 5, now=now)], [rows(twin, some, 5, now=now)])
    slots = np.arange(0, SLOTS, 3, dtype=np.uint64)
    numbers = chance.integers(0, 20, len(slots)).astype(np.uint64)
    taken = [each.take(slots, numbers) for each in (native, twin)]
    orders = [np.argsort(each.keys) for each in taken]
    same(*([part[order] for part in each[:5]] for each, order in zip(taken, orders, strict=True)))
    for slot in range(SLOTS):
        native.pack(slot)
    same(contents(native), contents(twin))
    assert np.array_equal(native.rows(), twin.rows())
    used = native.memory()
    for slot in range(0, SLOTS, 2):
        native.clear(slot)
        twin.clear(slot)
    others = np.arange(1 << 20, (1 << 20) + 40_000, dtype=np.uint64)
    others = others[slots_of(others) % 8 == 1][: int(twin.rows()[1::2].sum()) // 2]
    assert not native.prepare(np.array([1], np.uint64), np.array([300], np.uint64)).any()
    same([rows(native, others, 5)], [rows(twin, others, 5)])
    assert native.memory() <= used + (1 << 18), "rows of cleared slots are used again"
    same(contents(native), contents(twin))


@needs_library
def test_no_reader_sees_half_an_update() -> None:
    """Each update makes all values of a row equal; readers on two threads look for rows that are not."""
    native = both(dim=64, rule="sgd", initial="constant", hyper=Hyper(1.0))[0]
    keys = np.arange(500, dtype=np.uint64)
    rows(native, keys, 64)
    ended, torn, reads = threading.Event(), [], []

    def read() -> None:
        while not ended.is_set():
            found = rows(native, keys, 64, insert=False)
            torn.append(int((found != found[:, :1]).any(1).sum()))
            reads.append(1)

    def grow() -> None:
        for first in range(1000, 60_000, 1000):
            rows(native, np.arange(first, first + 1000, dtype=np.uint64), 64)
        native.remove(np.arange(1000, 60_000, dtype=np.uint64), remember=False)

    threads = [threading.Thread(target=read) for _ in range(2)] + [threading.Thread(target=grow)]
    for thread in threads:
        thread.start()
    gradients = np.ones((500, 64), np.float32)
    for step in range(400):
        native.update(keys, gradients * (1 + step % 7))
    threads[2].join()
    ended.set()
    for thread in threads:
        thread.join()
    assert len(reads) > 10
    assert sum(torn) == 0
    assert native.rows().sum() == 500


@needs_library
def test_updates_of_several_threads_all_count() -> None:
    native = both(dim=8, rule="sgd", initial="constant", scale=0.0, hyper=Hyper(1.0))[0]
    keys = np.arange(300, dtype=np.uint64)

    def push() -> None:
        for _ in range(200):
            rows(native, keys, 8)
            native.update(keys, np.full((300, 8), -1, np.float32))

    threads = [threading.Thread(target=push) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (rows(native, keys, 8, insert=False) == 600).all()


@pytest.mark.parametrize("removed", [[], [3, 30]])
@needs_library
def test_a_restore_removes_the_removed_keys_that_have_no_row_in_it(removed):
    source, _ = both()
    rows(source, np.array([1, 3], np.uint64), 5)
    copied = source.copy(np.arange(SLOTS, dtype=np.uint64), changed=False, keep=True)
    copied = copied._replace(removed=np.array(removed, np.uint64))
    for table in both():
        rows(table, np.array([1, 30], np.uint64), 5)
        table.restore(copied)
        left = contents(table)[0].tolist()
        assert left == ([1, 3] if removed else [1, 3, 30])
