"""What this node uses: processors, and the memory of its control group, its container or its machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from dlrover._util import cgroup
from dlrover.spec.usage import NodeUsage

INTERVAL = 15.0
"""Seconds between two looks."""


class UsageMeter:
    """Looks now and then. `look` takes milliseconds."""

    def __init__(self, interval: float = INTERVAL, *, alone: bool = False) -> None:
        """Begin to measure; ``alone``: no other node shares this node's container, if it is in one."""
        self.busy = -1.0
        """The share of time in which its accelerators work, 0 to 1; -1 while that is not known."""
        self._interval = interval
        self._grouped = _has_own_group() or (alone and cgroup.memory() is not None)
        self._looked = time.monotonic()
        self._spent = cgroup.cpu_seconds() if self._grouped else None
        self._seconds: dict[tuple[int, float], float] = {}

    def look(self, workers: Iterable[int]) -> NodeUsage | None:
        """What the node uses; None if it is too early for another look.

        Args:
            workers: Pids of its workers.
        """
        now = time.monotonic()
        passed = now - self._looked
        if passed < self._interval or not passed:
            return None
        self._looked = now
        used, limit = _memory()
        busy = self._group_seconds()
        if busy is None:
            busy = self._worker_seconds(workers)
        return NodeUsage(max(0.0, busy / passed), used, limit, cgroup.cores(), self.busy)

    def _group_seconds(self) -> float | None:
        """CPU seconds of everything on this node since the last look; None where nobody counts them."""
        if not self._grouped:
            return None
        before, self._spent = self._spent, cgroup.cpu_seconds()
        return None if before is None or self._spent is None else self._spent - before

    def _worker_seconds(self, workers: Iterable[int]) -> float:
        """CPU seconds of the workers that were there at the last look, too."""
        before, self._seconds = self._seconds, _cpu_seconds(workers)
        return sum(
            seconds - before[process]
            for process, seconds in self._seconds.items()
            if process in before
        )


def _has_own_group() -> bool:
    """Whether this process is in another control group than the one that has started it."""
    try:
        theirs = Path(f"/proc/{os.getppid()}/cgroup").read_text()
        return cgroup.PROC_CGROUP.read_text() != theirs
    except OSError:
        return False


def _cpu_seconds(workers: Iterable[int]) -> dict[tuple[int, float], float]:
    """CPU seconds of each worker and its descendants, by pid and start."""
    import psutil  # noqa: PLC0415 - it takes its time, which no start of a node should wait for

    found: dict[tuple[int, float], float] = {}
    for pid in workers:
        with contextlib.suppress(psutil.Error):  # it has ended
            worker = psutil.Process(pid)
            for process in (worker, *worker.children(recursive=True)):
                times = process.cpu_times()
                found[process.pid, process.create_time()] = times.user + times.system
    return found


def _memory() -> tuple[int, int]:
    """Bytes in use and bytes that there are: of the container, or of the machine where there is none."""
    within = cgroup.memory()
    if within is not None:
        return within
    import psutil  # noqa: PLC0415

    machine = psutil.virtual_memory()
    return machine.total - machine.available, machine.total
