"""What this node uses: its workers' processors, and the memory of its container or its machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from dlrover._util import cgroup
from dlrover.spec.usage import NodeUsage

INTERVAL = 15.0
"""Seconds between two looks."""


class UsageMeter:
    """Looks now and then. `look` takes milliseconds."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._seconds: dict[tuple[int, float], float] = {}

    def look(self, workers: Iterable[int]) -> NodeUsage | None:
        """What the node uses; None if it is too early for another look.

        Args:
            workers: Pids of its workers.
        """
        now = time.monotonic()
        passed = now - self._looked
        if passed < INTERVAL:
            return None
        self._looked = now
        before, self._seconds = self._seconds, _cpu_seconds(workers)
        busy = sum(
            seconds - before[process]
            for process, seconds in self._seconds.items()
            if process in before
        )
        used, limit = _memory()
        return NodeUsage(max(0.0, busy / passed), used, limit)


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
