"""Memory and processor figures of this process from the kernel's control groups (cgroups)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

PROC_CGROUP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")

NO_LIMIT = 1 << 60
"""Bytes; version 1 of the interface shows a larger number where there is no limit."""
_OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_USAGE = re.compile(r"^usage_usec (\d+)$", re.MULTILINE)


def oom_kills(proc: Path = PROC_CGROUP, root: Path = ROOT) -> int:
    """Return the out-of-memory kills in this process's memory cgroup; 0 if unknown."""
    for path in _event_files(proc, root):
        count = _kills(path)
        if count is not None:
            return count
    return 0


def oom_kills_of(group: Path) -> int:
    """Return the out-of-memory kills in the cgroup in a directory; 0 if unknown."""
    return next(
        filter(None, map(_kills, (group / "memory.events", group / "memory.oom_control"))), 0
    )


def _kills(path: Path) -> int | None:
    try:
        found = _OOM_KILL.search(path.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def memory(proc: Path = PROC_CGROUP, root: Path = ROOT) -> tuple[int, int] | None:
    """Return the bytes in use by this process's memory cgroup, without droppable pages, and its limit.

    Return None if there is no limit, or nothing is known.
    """
    groups = (_memory_of(directory) for directory in _memory_directories(proc, root))
    return next(filter(None, groups), None)


def available(proc: Path = PROC_CGROUP, root: Path = ROOT) -> int:
    """Return the bytes that this process's memory cgroup and its ancestors can still take, without cached files."""
    groups = dict.fromkeys(
        group
        for directory in _memory_directories(proc, root)
        for group in (directory, *directory.parents)
        if group.is_relative_to(root)
    )
    found = (_memory_of(group, ("inactive_file", "active_file")) for group in groups)
    return min((max(0, most - used) for used, most in filter(None, found)), default=NO_LIMIT)


def available_memory() -> int:
    """Return the bytes of memory that are left for this process: beyond them, the kernel kills instead of refusing."""
    import psutil  # noqa: PLC0415 - slow to import: not all who ask for control groups need it

    return min(int(psutil.virtual_memory().available), available())


def _memory_of(
    directory: Path, dropped: tuple[str, ...] = ("inactive_file",)
) -> tuple[int, int] | None:
    """Return the bytes in use by one group, without pages of the kinds that are dropped, and its limit."""
    for used, limit, prefix in (
        ("memory.current", "memory.max", ""),
        ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_"),
    ):
        try:
            most = (directory / limit).read_text().strip()
            if not most.isdecimal() or int(most) > NO_LIMIT:
                continue
            now = int((directory / used).read_text())
            counts = dict(
                line.split() for line in (directory / "memory.stat").read_text().splitlines()
            )
            cached = sum(int(counts.get(f"{prefix}{kind}", 0)) for kind in dropped)
        except (OSError, ValueError):
            continue
        return max(0, now - cached), int(most)
    return None


def cpu_seconds(proc: Path = PROC_CGROUP, root: Path = ROOT) -> float | None:
    """Return the processor time of all processes in this process's cgroup, in seconds; None if unknown."""
    own = own_groups(proc, root)
    try:
        if "cpuacct" in own:
            return int((own["cpuacct"] / "cpuacct.usage").read_text()) / 1e9
        if "" in own:
            found = _USAGE.search((own[""] / "cpu.stat").read_text())
            return int(found[1]) / 1e6 if found else None
    except (OSError, ValueError):
        return None
    return None


def processors(proc: Path = PROC_CGROUP, root: Path = ROOT) -> int:
    """Return the number of processors this process may use, at least 1: its cores, rounded up."""
    return max(1, math.ceil(cores(proc, root)))


def cores(proc: Path = PROC_CGROUP, root: Path = ROOT) -> float:
    """Return the cores' time this process may use: the smaller of its affinity and its quota."""
    usable = float(len(os.sched_getaffinity(0)))
    for folder in _processor_folders(proc, root):
        try:
            quota, period = _quota(folder)
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            usable = min(usable, quota / period)
    return usable


def own_groups(proc: Path = PROC_CGROUP, root: Path = ROOT) -> dict[str, Path]:
    """Return the directories of this process's cgroups by controller; the empty name is version 2.

    Inside a container, the group's own directory is often mounted at the root.
    """
    found = {}
    for controllers, relative in _lines(proc):
        names = [name for name in controllers.split(",") if (root / name).is_dir()]
        for name in names:
            within = root / name / relative
            found[name] = within if within.is_dir() else root / name
    return found


def _lines(proc: Path) -> Iterator[tuple[str, str]]:
    """Yield each hierarchy's controllers, none for version 2, and this process's path in it."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        yield controllers, group.lstrip("/")


def _memory_directories(proc: Path, root: Path) -> list[Path]:
    return list(dict.fromkeys(path.parent for path in _event_files(proc, root)))


def _quota(folder: Path) -> tuple[int, int]:
    """Return the quota of processor time per period, and the period, in microseconds; -1: no limit."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
        return (-1 if quota == "max" else int(quota)), int(period)
    quota = (folder / "cpu.cfs_quota_us").read_text()
    return int(quota), int((folder / "cpu.cfs_period_us").read_text())


def _processor_folders(proc: Path, root: Path) -> list[Path]:
    """Return the directories that may hold the quota, for versions 1 and 2 of the interface."""
    folders = [root, root / "cpu"]
    for controllers, relative in _lines(proc):
        if controllers == "":
            folders.append(root / relative)
        elif "cpu" in controllers.split(","):
            folders.append(root / "cpu" / relative)
    return folders


def _event_files(proc: Path, root: Path) -> list[Path]:
    """Return the files that may count the kills, for versions 1 and 2 of the interface."""
    files = []
    for controllers, relative in _lines(proc):
        if controllers == "":
            files.append(root / relative / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(root / "memory" / relative / "memory.oom_control")
    # Inside a container, the group's own directory is often mounted at the root.
    return [*files, root / "memory.events", root / "memory" / "memory.oom_control"]
