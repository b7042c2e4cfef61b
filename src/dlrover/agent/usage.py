"""The node's CPU and memory usage, measured on its control group, its workers or its machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from dlrover._util import cgroup
from dlrover.spec.measurements import NodeUsage

INTERVAL = 15.0
"""Seconds between two measurements."""


class UsageMeter:
    """A meter of the node's CPU and memory usage. `look` takes milliseconds."""

    def __init__(self, interval: float = INTERVAL, *, alone: bool = False) -> None:
        """Start measuring; ``alone`` says that no other node shares this node's container, if it has one."""
        self.busy = -1.0
        """Share of time in which the node's accelerators work, 0 to 1; -1 while unknown."""
        self._interval = interval
        self._grouped = _has_own_group() or (alone and cgroup.memory() is not None)
        self._looked = time.monotonic()
        self._spent = cgroup.cpu_seconds() if self._grouped else None
        self._seconds: dict[tuple[int, float], float] = {}

    def look(self, workers: Iterable[int]) -> NodeUsage | None:
        """Return the node's usage; None if the measurement interval has not passed yet.

        Args:
            workers: Pids of the node's workers.
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
        """Return the control group's CPU seconds since the last measurement; None if they are not counted."""
        if not self._grouped:
            return None
        before, self._spent = self._spent, cgroup.cpu_seconds()
        return None if before is None or self._spent is None else self._spent - before

    def _worker_seconds(self, workers: Iterable[int]) -> float:
        """Return the CPU seconds since the last measurement of processes that already existed then."""
        before, self._seconds = self._seconds, _cpu_seconds(workers)
        return sum(
            seconds - before[process]
            for process, seconds in self._seconds.items()
            if process in before
        )


def _has_own_group() -> bool:
    """Return whether this process is in a different control group from its parent."""
    try:
        theirs = Path(f"/proc/{os.getppid()}/cgroup").read_text()
        return cgroup.PROC_CGROUP.read_text() != theirs
    except OSError:
        return False


def _cpu_seconds(workers: Iterable[int]) -> dict[tuple[int, float], float]:
    """Return the CPU seconds of each worker and its descendants, by pid and creation time."""
    import psutil  # noqa: PLC0415 - slow to import: no node should wait for it at its start

    found: dict[tuple[int, float], float] = {}
    for pid in workers:
        with contextlib.suppress(psutil.Error):  # the process has ended
            worker = psutil.Process(pid)
            for process in (worker, *worker.children(recursive=True)):
                times = process.cpu_times()
                found[process.pid, process.create_time()] = times.user + times.system
    return found


def _memory() -> tuple[int, int]:
    """Return the bytes in use and the limit of the container; without a container limit, the machine's."""
    within = cgroup.memory()
    if within is not None:
        return within
    import psutil  # noqa: PLC0415

    machine = psutil.virtual_memory()
    return machine.total - machine.available, machine.total
