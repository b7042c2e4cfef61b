"""Random sequences of operations on a table beside a dict, over the lives of processes that end at any point.

A sequence is two or three lives, each a process. The first ones end at once when they are at their labelled point, if
they come to it; the next one restores what was saved, compares it with the dict as it was then, and goes on.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from dlrover._native.tables import KINDS, RULES, SLOTS, slots_of
from dlrover.checkpoint.storage.stores import open_store
from dlrover.embedding import (
    BloomAdmission,
    ChanceAdmission,
    CountAdmission,
    Expiry,
    HashTable,
    Initializer,
    RowOptimizer,
    Spill,
    table as table_module,
)
from dlrover.embedding.machine import chain
from dlrover.embedding.options import TableOptions
from dlrover.embedding.remote import server as server_module, stored
from dlrover.embedding.remote.client import ServerGroup
from dlrover.embedding.remote.saving import TableCheckpoints
from dlrover.embedding.remote.table import RemoteTable
from dlrover.embedding.table import as_words
from dlrover.errors import ConfigurationError
from tests.embedding.crashes import FILE, SERVERS, Crash
from tests.embedding.dict_model import DictModel, SavedModel, SavedRow, added, exported
from tests.embedding.servers import Cluster
from tests.support.children import Child
from tests.waiting import until

ALL = np.arange(SLOTS)
DISK = 1 << 18
MANY = 199
"""One sequence of so many has more rows than its memory holds; the others send rows to the disk by an operation."""
LIFE = 120
"""Seconds after which a life hangs."""


class Case(NamedTuple):
    """A sequence, made from its seed."""

    seed: int
    on_servers: bool
    wide: bool
    point: str
    nth: int
    kind_of_keys: str

    @property
    def compacts(self) -> bool:
        """True if segments are to be compacted: rows are wide, stay, and go to the disk more often."""
        return not self.wide and "compacted" in self.point


def case(seed: int) -> Case:
    """Return the sequence of a seed: each point has its turn."""
    chance = np.random.default_rng([seed, 0])
    on_servers, turn = bool(seed % 2), seed // 2
    points = SERVERS if on_servers else FILE
    point = points[turn % len(points)]
    often = point.startswith(("pwrite", "posix_fallocate segment", "unlink segment"))
    nth = int(chance.integers(1, 12 if often else 4))
    kind = str(chance.choice(["int64", "uint64", "text"]))
    return Case(seed, on_servers, seed % MANY == MANY // 2, point, nth, kind)


def options(made: Case, directory: Path) -> TableOptions:
    """Return the options of a sequence's table: any of each kind."""
    chance = np.random.default_rng([made.seed, 1])
    dim = 4 if made.wide else int(chance.choice([3, 8, 24, 40]))
    if made.compacts:
        dim = 40
    penalties = {"l1": 0.001, "l2": 0.01, "l21": float(chance.choice([0.0, 0.3]))}
    optimizer = RowOptimizer(
        name=str(chance.choice(["adam", "ftrl"] if made.compacts else [*RULES])),
        learning_rate=0.1,
        weight_decay=0.01,
        **penalties,
    )
    admission = [None, CountAdmission(2), BloomAdmission(3, 1 << 15), ChanceAdmission(0.5)]
    expiry = [None, Expiry(seconds=40), Expiry(steps=12), Expiry(norm=0.02), Expiry(steps=9, norm=0.01)]  # fmt: skip
    common = {
        "dim": dim,
        "optimizer": optimizer,
        "seed": made.seed,
        "admission": admission[chance.integers(1 if made.compacts else len(admission))],
        "expiry": expiry[chance.integers(1 if made.compacts else len(expiry))],
        "initializer": Initializer(str(chance.choice(["uniform", "normal", "constant"])), 0.05),
        "dtype": KINDS[chance.integers(len(KINDS))],
        "spill": Spill(directory=str(directory / "spill"), nbytes=DISK * (40 if made.wide else 1)),
    }
    if not made.wide:
        return TableOptions(**common, memory_bytes=64 << 20)
    try:
        HashTable.of(TableOptions(**common, memory_bytes=1 << 20))
    except ConfigurationError as error:
        least = int(re.findall(r"(\d+) or more", str(error))[0])
    return TableOptions(**common, memory_bytes=least)


# ---- a table, and what was saved of it


class _InProcess:
    """A table in this process, and its one file."""

    def __init__(self, directory: Path, made: TableOptions, records: Records) -> None:
        self._file, self._records = directory / "saved", records
        self.owners = np.zeros(SLOTS, np.intp)
        self.table = HashTable.load(self._file) if self._file.exists() else HashTable.of(made)
        assert self._file.exists() or not records.done, "a complete file is gone"

    def tables(self) -> list[HashTable]:
        return [self.table]

    def held(self, slots: np.ndarray) -> dict[int, SavedRow]:
        return exported([self.table], [slots])

    def restored(self) -> SavedModel | None:
        """Return the moment that was restored: the last one, or the one before if it was not complete."""
        if not self._file.exists():
            return None
        held = self.held(ALL)
        numbers = {self._records.begun, self._records.done} - {0}
        for each in map(self._records.read, numbers):
            if each.rows == held and each.steps.get(0, 0) == self.table.step:
                return each
        raise AssertionError("the file is neither of the last save nor of the one before")

    def save(self, _number: int, *, full: bool) -> None:
        del full
        self.table.save(self._file)

    def wait(self) -> None:
        pass

    def load(self) -> SavedModel | None:
        if not self._file.exists():
            return None
        self.table = HashTable.load(self._file)
        return self.restored()

    def close(self) -> None:
        del self.table


class _OnServers:
    """A table on servers, and its checkpoints."""

    def __init__(self, directory: Path, made: TableOptions, records: Records, count: int) -> None:
        self._place, self._records = str(directory / "tables"), records
        self._cluster = Cluster()
        for index in range(count):
            self._cluster.start(index, servers=count)
        self._group = ServerGroup(self._cluster.directory, timeout=LIFE / 2)
        self.table = RemoteTable(self._group, "rows", HashTable.of(made))
        self._checkpoints = TableCheckpoints(self._cluster.directory, self._place, keep=1)
        self.owners = np.array(self._cluster.directory.placement.owners)
        self._step = self._checkpoints.load() if Path(self._place).exists() else None
        assert records.done <= (self._step or 0) <= records.begun, "a complete checkpoint is gone"

    def tables(self) -> list[HashTable]:
        servers = self._cluster.servers
        until(lambda: all("rows" in each._holding._tables for each in servers.values()))
        return [servers[index]._holding._tables["rows"] for index in sorted(servers)]

    def held(self, slots: np.ndarray) -> dict[int, SavedRow]:
        tables = self.tables()
        return exported(tables, [slots[self.owners[slots] == i] for i in range(len(tables))])

    def restored(self) -> SavedModel | None:
        """Return the moment that was restored: rows of an increment that were only looked up are as before."""
        if self._step is None:
            return None
        store = open_store(self._place)
        newest = next(each for each in stored.manifests(store) if each.step == self._step)
        rows: dict[int, SavedRow] = {}
        for manifest in chain.chain(newest, lambda id_: stored.read_manifest(store, id_)):
            record = self._records.read(manifest.step)
            rows = added(rows, record) if manifest.number else record.rows
        return SavedModel(rows, set(), set(), {}, record.clocks)

    def save(self, number: int, *, full: bool) -> None:
        self._checkpoints.save(number, full=full)

    def wait(self) -> None:
        self._checkpoints.wait()

    def load(self) -> SavedModel | None:
        self._step = self._checkpoints.load()
        return self.restored()

    def close(self) -> None:
        self._group.close()
        self._cluster.close()
        del self._cluster, self.table


class Records:
    """The dict at each save, written by the process before it saves."""

    def __init__(self, directory: Path, crash: Crash) -> None:
        self._directory, self._crash = directory, crash
        directory.mkdir(exist_ok=True)
        self.begun = max([int(each.name) for each in directory.glob("[0-9]*")], default=0)
        done = directory / "done"
        self.done = int(done.read_text()) if done.exists() else 0
        """The last save that was complete for sure."""

    def read(self, number: int) -> SavedModel:
        return pickle.loads((self._directory / str(number)).read_bytes())[0]

    def clock(self) -> int:
        """Return the time at the last save."""
        if not self.begun:
            return 1000
        return pickle.loads((self._directory / str(self.begun)).read_bytes())[1]

    def begin(self, model: DictModel) -> int:
        number = self.begun + 1
        data = pickle.dumps((model.saved(), model.clock))
        self._crash.aside(lambda: self._replace(str(number), data))
        self.begun = number
        return number

    def complete(self) -> None:
        self.done = self.begun
        self._crash.aside(lambda: self._replace("done", str(self.done).encode()))

    def _replace(self, name: str, data: bytes) -> None:
        (self._directory / f".{name}").write_bytes(data)
        (self._directory / f".{name}").replace(self._directory / name)


# ---- a life


class _Life:
    """One process's operations on a table and a dict."""

    def __init__(self, made: Case, number: int, directory: Path, crash: Crash) -> None:
        self._case = made
        self._chance = np.random.default_rng([made.seed, 2, number])
        self._records = Records(directory / "records", crash)
        self._first = self._records.begun
        chosen, servers = (
            options(made, directory),
            1 if made.compacts else int(self._chance.integers(1, 4)),
        )
        self._model = DictModel(chosen, np.zeros(SLOTS, np.intp), clock=self._records.clock())
        table_module.time = SimpleNamespace(time=lambda: self._model.clock)  # type: ignore[attr-defined]
        self._table: Any = (
            _OnServers(directory, chosen, self._records, servers)
            if made.on_servers
            else _InProcess(directory, chosen, self._records)
        )
        self._model.owners = self._table.owners
        self._names = self._chance.permutation(24_000 if made.wide else 300)
        self._slots = np.unique(slots_of(as_words(self._keys(self._names))))
        self._spill = directory / "spill"
        self._take(self._table.restored())

    def _take(self, saved: SavedModel | None) -> None:
        """Have the dict of a save, which is what was restored."""
        if saved is None:
            return
        self._model.restore(saved.rows, saved.clocks)
        if not self._case.on_servers:
            self._model.steps = dict(saved.steps)
        self.compare()

    def compare(self) -> None:
        """Compare all rows, with their states, uses and last uses."""
        held = self._table.held(self._slots)
        assert len(held) == sum(len(table) for table in self._table.tables())
        expected = self._model.saved_rows()
        different = [
            key for key in held.keys() | expected.keys() if held.get(key) != expected.get(key)
        ]
        assert not different, [(key, held.get(key), expected.get(key)) for key in different[:3]]

    def run(self, steps: int) -> None:
        """Operate, compare, save and close."""
        if self._case.wide:
            for some in np.array_split(self._names, 5):
                self._lookup(self._keys(some))
                self._lookup(self._keys(some[:1000]))
            if self._model.options.admission is None and not self._case.on_servers:
                assert self._table.tables()[0].stats().spilled_rows > 0
        if self._case.compacts:
            self._lookup(self._keys(self._names))
        for _ in range(steps):
            self._any()
        self.compare()
        self._save(full=False)
        self._wait()
        self._take(self._table.load())
        self._table.close()

    def end(self) -> None:
        """Check that a table of this process that is gone leaves nothing."""
        self._table = None
        gc.collect()
        if not self._case.on_servers:  # a compaction in the background may still use it
            until(lambda: not [*self._spill.glob(f"table-{os.getpid()}-*")])

    def _keys(self, names: np.ndarray) -> Any:
        match self._case.kind_of_keys:
            case "text":
                return [f"user {name}" for name in names.tolist()]
            case "uint64":
                return names.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            case _:
                return names.astype(np.int64) * 7919 - 1_000_000

    def _some(self) -> Any:
        most = 2000 if self._case.wide else 150 if self._case.compacts else 60
        return self._keys(self._chance.choice(self._names, self._chance.integers(1, most)))

    def _any(self) -> None:
        operations = {
            self._look_some: 6, self._peek_some: 2, self._update_some: 5, self._evict: 1, self._pass_time: 2,
            self._save_some: 2, self._wait: 1, self._load: 0.4, self._remove_and_move: 1, self._demote: 16 if self._case.compacts else 4,
        }  # fmt: skip
        shares = np.array([*operations.values()])
        [*operations][self._chance.choice(len(shares), p=shares / shares.sum())]()

    def _look_some(self) -> None:
        self._lookup(self._some())

    def _peek_some(self) -> None:
        keys = self._some()
        found = self._table.table.peek(keys)
        assert found.tobytes() == self._model.peek(as_words(keys)).tobytes()

    def _update_some(self) -> None:
        keys = self._some()
        shape = len(keys), self._model.options.dim
        gradients = self._chance.normal(size=shape).astype(np.float32)
        self._table.table.update(keys, gradients)
        self._model.update(as_words(keys), gradients)

    def _evict(self) -> None:
        assert self._table.table.evict() == self._model.evict()

    def _pass_time(self) -> None:
        self._model.clock += int(self._chance.integers(1, 15))

    def _save_some(self) -> None:
        self._save(full=bool(self._chance.random() < 0.3))

    def _load(self) -> None:
        self._wait()
        self._take(self._table.load())

    def _demote(self) -> None:
        for table in self._table.tables():
            demote(table, self._chance)

    def _lookup(self, keys: Any) -> None:
        found = self._table.table.lookup(keys)
        expected = self._model.lookup(as_words(keys), found)
        assert found.tobytes() == expected.tobytes()

    def _remove_and_move(self) -> None:
        """Remove keys; remove slots and put them back. Servers have no such requests."""
        if self._case.on_servers:
            return
        words = as_words(self._some())[:20]
        assert self._table.table.remove(words) == self._model.remove(words.tolist())
        some = self._chance.integers(0, SLOTS, 100)
        rows = self._table.table.export_rows(np.unique(some))
        self._table.table.remove_slots(some)
        self._table.table.restore_rows(rows, changed=True)
        self._model.forget_waiting(some)

    def _save(self, *, full: bool) -> None:
        self._wait()
        number = self._records.begin(self._model)
        self._table.save(number, full=full)
        if not self._case.on_servers:
            self._records.complete()

    def _wait(self) -> None:
        if self._records.begun > max(self._first, self._records.done):
            self._table.wait()
            self._records.complete()


def demote(table: HashTable, chance: np.random.Generator) -> None:
    """Send some rows of every slot to the disk."""
    tiered: Any = table._table
    with tiered._lock:
        held = tiered._hot.rows()
        slots = np.flatnonzero(held).astype(np.uint64)
        numbers = chance.binomial(held[slots].astype(np.int64), chance.choice([0.3, 0.7, 1.0]))
        tiered._demote(slots, numbers)


def sequence(seed: int, directory: Path, steps: int = 30) -> str:
    """Check the sequence of a seed; return the point at which one of its processes ended, empty if none came to it."""
    made = case(seed)
    lives = 2 + seed % 5 // 4
    ended = [
        _live(made, number, directory, steps, crash=number < lives) for number in range(1, lives)
    ]
    assert not _live(made, lives, directory, steps // 3, crash=False)
    return made.point if any(ended) else ""


def _live(made: Case, number: int, directory: Path, steps: int, *, crash: bool) -> bool:
    """Run a life; return whether it ended at its point. Fails if it differed from the dict, failed or hung."""

    def live() -> None:
        server_module.POLL = 0.01  # servers look for a newer placement more often than in a job
        watch = Crash(made.point if crash else "", made.nth)
        watch.begin()
        life = _Life(made, number, directory, watch)
        life.run(steps)
        life.end()

    code = Child(live, LIFE).end()
    assert code in {0, -signal.SIGKILL}, f"{made}: life {number} ended by signal {-code}"
    return code != 0
