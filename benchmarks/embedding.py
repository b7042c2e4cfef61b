"""What a table that is ten times as large as its memory costs beside one in memory, and how long its growth makes wait.

Keys come by a power law (zipf, exponent 1.05); each batch is looked up and updated. The table on disk is measured
with the kernel's page cache as it is, and with its files dropped from the cache before each batch.
``benchmarks/README.md`` explains every figure.
"""
# ruff: noqa: SLF001  # what is on disk is known to the table alone

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dlrover._native import library
from dlrover._native.cold import NativeReader
from dlrover._native.tables import SLOTS
from dlrover.embedding import HashTable, Spill

DIM, BATCH, TENTH = 64, 8192, 10
LATE = 2.0
HUGE = 2 << 20
"""Bytes of a huge page."""
ROW = 16 + 8 * DIM
"""Bytes of a row with its header and the state of Adagrad."""


def resident() -> int:
    """Bytes of this process in memory that are no pages of files."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


class Keys:
    """Keys by the power law, in no order of their numbers."""

    def __init__(self, count: int) -> None:
        shares = np.arange(1, count + 1) ** -1.05
        self._sums = np.cumsum(shares / shares.sum())
        self._names = np.random.default_rng(1).permutation(count)
        self._random = np.random.default_rng(2)

    def batch(self) -> np.ndarray:
        """Return the next keys, ``(BATCH,)``."""
        drawn = np.searchsorted(self._sums, self._random.random(BATCH))
        return self._names[drawn.clip(max=len(self._names) - 1)]


def drop(directory: Path) -> None:
    """Drop the files from the page cache."""
    for path in directory.glob("*/segment-*"):
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # compaction in the background has deleted it
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def steps(
    table: HashTable, keys: Keys, seconds: float, before: Callable[[], None]
) -> dict[str, float]:
    """Millions of keys per second, and the longest wait for a lookup."""
    spent, longest, count = 0.0, 0.0, 0
    while spent < seconds:
        batch = keys.batch()
        before()
        began = time.perf_counter()
        rows = table.lookup(batch)
        longest = max(longest, time.perf_counter() - began)
        table.update(batch, rows)
        spent += time.perf_counter() - began
        count += 1
    return {"M keys/s": count * BATCH / spent / 1e6, "longest lookup, ms": longest * 1e3}


def fill(table: HashTable, count: int, watch: Callable[[], None]) -> float:
    """Insert all rows; return the millions of keys per second."""
    began = time.perf_counter()
    for first in range(0, count, BATCH):
        table.lookup(np.arange(first, min(first + BATCH, count)))
        watch()
    return count / (time.perf_counter() - began) / 1e6


def tiers(count: int, seconds: float, place: str) -> dict[str, Any]:
    """Measure a table whose memory holds a tenth, and count the files that it leaves."""
    with tempfile.TemporaryDirectory(dir=place) as directory:
        found = measured(count, seconds, Path(directory))
        return found | {"files left": len([*Path(directory).iterdir()])}


def measured(count: int, seconds: float, directory: Path) -> dict[str, Any]:
    """Measure a table whose memory holds a tenth."""
    limit, disk = count * ROW // TENTH, int(count * ROW * 1.4)
    keys = Keys(count)
    empty = resident()
    table = HashTable(DIM, memory_bytes=limit, spill=Spill(directory=str(directory), nbytes=disk))
    most = {"nbytes": 0, "spilled": 0, "resident": 0}

    def watch() -> None:
        stats = table.stats()
        most["nbytes"] = max(most["nbytes"], stats.nbytes)
        most["spilled"] = max(most["spilled"], stats.spilled_bytes)
        most["resident"] = max(most["resident"], resident() - empty)

    found: dict[str, Any] = {"insert, M keys/s": fill(table, count, watch)}
    steps(table, keys, seconds, watch)
    held = resident()
    found["page cache"] = steps(table, keys, seconds, watch)

    def cold() -> None:
        watch()
        drop(directory)

    segments: Any = table._table._cold._segments  # type: ignore[attr-defined]
    found["io_uring"] = bool(segments._reader.ring)
    found["disk"] = steps(table, keys, seconds, cold)
    loaded = library.load("auto").library
    if loaded is not None:
        segments._reader = NativeReader(loaded, ring=False)
        found["disk, pread by threads"] = steps(table, keys, seconds, cold)
    found["rows in memory"] = 1 - table.stats().spilled_rows / len(table)
    found["limit"] = {
        "memory_bytes": limit,
        "most nbytes": most["nbytes"],
        "most resident": most["resident"],
        "resident before measured steps": held - empty,
        "spill.nbytes": disk,
        "most spilled_bytes": most["spilled"],
    }
    return found


CHILD = """
import sys, threading
import numpy as np
from dlrover.embedding import HashTable, Spill
place, count = sys.argv[1], int(sys.argv[2])
table = HashTable(64, memory_bytes=64 << 20, spill=Spill(directory=place + "/spill", nbytes=int(count * 528 * 1.3)))
keys = np.arange(count)
for first in range(0, count, 8192):
    table.lookup(keys[first:first + 8192])
table.save(place + "/saved")
random = np.random.default_rng(0)
while True:
    some = random.choice(count, 8192, replace=False)
    table.update(some, np.ones((8192, 64), np.float32))
    if table._table._cold._busy:
        print("compacting", flush=True)
"""


def killed(count: int, place: str) -> dict[str, float]:
    """Kill a process with SIGKILL while it compacts; load what it saved in this one."""
    with tempfile.TemporaryDirectory(dir=place) as directory:
        command = [sys.executable, "-c", CHILD, directory, str(count)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "compacting\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        began = time.perf_counter()
        table = HashTable.load(Path(directory, "saved"))
        seconds = time.perf_counter() - began
        model = HashTable(DIM)
        wrong = 0
        for first in range(0, count, BATCH):
            keys = np.arange(first, min(first + BATCH, count))
            wrong += int((table.peek(keys) != model.lookup(keys)).any(1).sum())
        left = len([*Path(directory, "spill").iterdir()])
        del table
        return {
            "load, s": seconds,
            "rows": count,
            "rows that differ": wrong,
            "tables in the directory": left // 2,
        }


def growth(count: int, batch: int) -> dict[str, Any]:
    """How long lookups of new keys wait; beside it, how long the first touch of a huge page takes, and the next one.

    CPU time is what the lookup itself takes while other work keeps the processors busy.
    """
    table = HashTable(DIM)
    keys = np.random.default_rng(0).permutation(count)
    lookups = [
        timed(functools.partial(table.lookup, some))
        for some in np.array_split(keys, count // batch)
    ]
    return {
        "batch": batch,
        "lookup of new keys": waited(lookups),
        "first touch of 2 MiB": waited(touches()),
        "touch of 2 MiB that were just freed": waited(touches()),
    }


def paced(steps: int) -> dict[str, Any]:
    """How long lookups of 1,024 keys wait, half of them new, one every 4 ms."""
    table, random, half = HashTable(DIM), np.random.default_rng(0), 512
    times = []
    for first in range(0, steps * half, half):
        known = random.integers(0, max(1, first), half)
        keys = np.concatenate([np.arange(first, first + half), known])
        times.append(timed(functools.partial(table.lookup, keys)))
        time.sleep(0.004)
    late = sum(cpu > LATE for _, cpu in times)
    return {"lookups": steps, f"beyond {LATE:g} ms of CPU time": late} | waited(times)


def copies(count: int) -> dict[str, float]:
    """CPU time of the copies that a save makes before the training goes on, ms; the median of 15."""
    table, slots, few = HashTable(DIM), range(SLOTS), np.arange(1000)
    table.lookup(np.arange(count))
    found = {}
    for name, changed in (("all rows", False), ("1,000 changed rows", True)):
        times = []
        for _ in range(15):
            table.export_rows(slots, changed=True, keep=False)
            table.update(few, np.ones((1000, DIM), np.float32))
            copy = functools.partial(table.export_rows, slots, changed=changed, keep=False)
            times.append(timed(copy)[1])
        found[name] = float(np.median(times))
    return found


def touches() -> list[tuple[float, float]]:
    """Times of touches of new huge pages."""
    with mmap.mmap(-1, 256 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        pages = range(0, 256 * HUGE, HUGE)
        return [timed(functools.partial(memory.__setitem__, page, 1)) for page in pages]


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU time of a call, ms."""
    wall, cpu = time.perf_counter(), time.thread_time()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.thread_time() - cpu) * 1e3


def waited(times: list[tuple[float, float]]) -> dict[str, list[float]]:
    """Median, 99th percentile and maximum of wall and CPU times, ms."""
    both = zip(("wall, ms", "CPU, ms"), zip(*times, strict=True), strict=True)
    return {
        name: [round(float(np.percentile(each, p)), 2) for p in (50, 99, 100)]
        for name, each in both
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--place", default=tempfile.gettempdir(), help="directory on the disk")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {
        "machine": platform.platform(),
        "library": library.load("auto").reason,
        "load before": os.getloadavg()[0],
        "rows": given.rows,
    }
    found["growth"] = [growth(given.rows, batch) for batch in (1024, BATCH)]
    found["growth at a pace"] = paced(1500)
    found["copies of 100,000 rows, ms"] = copies(100_000)
    found["tiers"] = tiers(given.rows, given.seconds, given.place)
    table = HashTable(DIM)
    whole = {"insert, M keys/s": fill(table, given.rows, lambda: None)}
    keys = Keys(given.rows)
    steps(table, keys, given.seconds / 2, lambda: None)
    found["memory"] = whole | steps(table, keys, given.seconds, lambda: None)
    del table
    for name in ("page cache", "disk", "disk, pread by threads"):
        if name in found["tiers"]:
            one = found["tiers"][name]
            one["of memory"] = one["M keys/s"] / found["memory"]["M keys/s"]
    found["killed while compacting"] = killed(given.rows // 4, given.place)
    found["load after"] = os.getloadavg()[0]
    text = json.dumps(found, indent=1)
    sys.stdout.write(text + "\n")
    if given.output is not None:
        given.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
