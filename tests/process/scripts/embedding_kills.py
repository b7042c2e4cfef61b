"""Rows on embedding servers that are killed, beside a dict: ``embedding_kills.py OUT SEED``. It ends once ``OUT/end`` exists.

Each step looks keys of all servers up, updates them, and then reads all rows. A server that has started again may have
its slots as they were at the last save, and nothing else may differ. ``OUT/steps`` gets a line for each step: when it
began, when it ended, how many slots had the rows of a save, and how many updates of rows these had lost. ``OUT/saving``
exists while a save is under way.
"""

import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import uncompiled  # noqa: F401 - nothing here is compiled

from dlrover import launched
from dlrover._native.tables import slots_of
from dlrover.embedding import Initializer, checkpoints, open_table
from dlrover.embedding.remote.directory import JobDirectory
from dlrover.errors import InfrastructureError

KEYS, BATCH, DIM = 4000, 400, 4
NEW = np.full(DIM, 3.5, np.float32)  # gradients are whole, so that no row becomes zero
EVERY = np.arange(KEYS)
SLOT_OF = slots_of(EVERY.astype(np.uint64))


class Rows(NamedTuple):
    """All rows, and how often each has been updated; a row that is missing is NaN."""

    values: np.ndarray
    updates: np.ndarray

    def copy(self) -> "Rows":
        return Rows(self.values.copy(), self.updates.copy())

    def take(self, other: "Rows", mine: np.ndarray) -> None:
        self.values[mine], self.updates[mine] = other.values[mine], other.updates[mine]

    def look(self, keys: np.ndarray) -> None:
        new = keys[np.isnan(self.values[keys, 0])]
        self.values[new], self.updates[new] = NEW, 0

    def push(self, keys: np.ndarray, gradients: np.ndarray) -> None:
        there = ~np.isnan(self.values[keys, 0])
        self.values[keys[there]] -= gradients[there]
        self.updates[keys[there]] += 1


class Watch(threading.Thread):
    """Notes which slots a server that has started again had, from its last placement before."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._directory = JobDirectory(launched.given.relay)
        self._lock = threading.Lock()
        self._starts: dict[int, int] = {}
        self._held: dict[int, set[int]] = {}
        self._lost: set[int] = set()
        self._before: set[int] = set()
        self.look()

    def run(self) -> None:
        while True:
            time.sleep(0.02)
            self.look()

    def look(self) -> None:
        with self._lock:
            placement = self._directory.look(-1)
            for slot, owner in enumerate(placement.owners):
                self._held.setdefault(owner, set()).add(slot)
            for index, server in placement.servers.items():
                if self._starts.setdefault(index, server.start) != server.start:
                    self._lost |= self._held.get(index, set())
                    self._starts[index] = server.start

    def lost(self) -> set[int]:
        """Return the slots of servers that have started again since the last call but one.

        One that is killed after a read of all rows may start again before the call that follows the read.
        """
        self.look()
        with self._lock:
            lost, self._before = self._lost | self._before, self._lost
            self._lost, self._held = set(), {}
            return lost


class Job:
    def __init__(self, out: Path, seed: int) -> None:
        self._out, self._chance = out, np.random.default_rng(seed)
        self._table = open_table("users", DIM, optimizer="sgd", learning_rate=1.0, initializer=Initializer("constant", 3.5))  # fmt: skip
        self._saves = checkpoints(str(out / "tables"))
        self._watch = Watch()
        self._rows = Rows(np.full((KEYS, DIM), np.nan, np.float32), np.zeros(KEYS, np.int64))
        self._complete = self._copying = [self._rows.copy()]  # what a save may hold
        self.failed = 0

    def save(self, number: int) -> None:
        """Begin a save; one that fails since a server is lost is no harm."""
        self.finish()
        (self._out / "saving").touch()
        self._copying = [self._rows.copy()]
        self._attempt(lambda: self._saves.save(number))

    def finish(self) -> None:
        if self._attempt(self._saves.wait):
            self._complete = self._copying
        (self._out / "saving").unlink(missing_ok=True)

    def _attempt(self, call) -> bool:
        try:
            call()
        except InfrastructureError as error:
            sys.stdout.write(f"A save has failed: {error}\n")
            self.failed += 1
            self._copying = self._complete
            return False
        return True

    def step(self) -> tuple[int, int]:
        """Train, and compare; return the slots with rows of a save, and the updates that these had lost."""
        keys = self._chance.choice(KEYS, BATCH, replace=False)
        gradients = self._chance.integers(-8, 8, (BATCH, DIM)).astype(np.float32)
        self._table.lookup(keys)
        self._rows.look(keys)
        self._table.update(keys, gradients)
        self._rows.push(keys, gradients)
        found = self._table.peek(EVERY)
        lost = self._watch.lost()
        found[~found.any(1)] = np.nan
        return self._compared(found, lost, keys, gradients)

    def _compared(self, found, lost, keys, gradients) -> tuple[int, int]:
        same = _equal(found, self._rows.values)
        different = set(SLOT_OF[~same].tolist())
        assert different <= lost, (different - lost, "slots of a server that was not killed")
        candidates = [*self._candidates(keys, gradients)] if different else []
        updates = 0
        for slot in different:
            mine = slot == SLOT_OF
            fitting = [each for each in candidates if _equal(found[mine], each.values[mine]).all()]
            assert fitting, (slot, EVERY[mine & ~same], found[mine & ~same], "of no save")
            updates += int((self._rows.updates[mine] - fitting[0].updates[mine]).clip(0).sum())
            self._rows.take(fitting[0], mine)
        if (
            different and self._copying is not self._complete
        ):  # the server may have been lost before its copy
            reverted = self._copying[0].copy()
            reverted.take(self._complete[0], np.isin(SLOT_OF, [*different]))
            self._copying.append(reverted)
        return len(different), updates

    def _candidates(self, keys, gradients):
        """Return what a slot may be: rows of a save, with the lookup or the update of this step after it or not."""
        for saved in [*self._complete, *self._copying]:
            for look in (False, True):
                for push in (False, True):
                    made = saved.copy()
                    if look:
                        made.look(keys)
                    if push:
                        made.push(keys, gradients)
                    yield made


def _equal(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return ((one == other) | (np.isnan(one) & np.isnan(other))).all(1)


def main(out: Path, seed: int) -> None:
    job = Job(out, seed)
    job._watch.start()
    with (out / "steps").open("w", buffering=1) as steps:
        number = 0
        progress = torch.optim.SGD(
            [torch.nn.Parameter(torch.zeros(1))]
        )  # tells the job of each step
        while not (out / "end").exists():
            began = time.time()
            slots, updates = job.step()
            progress.step()
            steps.write(f"{began} {time.time()} {slots} {updates}\n")
            number += 1
            if number % 10 == 5:
                job.save(number)
            if number % 10 == 0:
                job.finish()
            time.sleep(0.01)
    (out / "failed").write_text(str(job.failed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
