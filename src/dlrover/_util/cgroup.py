"""Memory and processor figures of this process from the kernel's control groups (cgroups)."""

from __future__ import annotations

import contextlib
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
    counts = map(_kills, _folders("memory", proc, root))
    return next((count for count in counts if count is not None), 0)


def oom_kills_of(group: Path) -> int:
    """Return the out-of-memory kills in the cgroup in a directory; 0 if unknown."""
    return _kills(group) or 0


def _kills(group: Path) -> int | None:
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            if found := _OOM_KILL.search((group / name).read_text()):
                return int(found[1])
    return None


def memory(proc: Path = PROC_CGROUP, root: Path = ROOT) -> tuple[int, int] | None:
    """Return the bytes in use by this process's memory cgroup, without droppable pages, and its limit.

    Return None if there is no limit, or nothing is known.
    """
    return next(filter(None, map(_memory_of, _folders("memory", proc, root))), None)


def available(proc: Path = PROC_CGROUP, root: Path = ROOT) -> int:
    """Return the bytes that this process's memory cgroup and its ancestors can still take, without cached files."""
    groups = _with_parents("memory", proc, root)
    found = (_memory_of(group, ("inactive_file", "active_file")) for group in groups)
    return min((max(0, most - used) for used, most in filter(None, found)), default=NO_LIMIT)


def least_limit(
    controller: str, files: tuple[str, ...], proc: Path = PROC_CGROUP, root: Path = ROOT
) -> int | None:
    """Return the least number in such files of this process's cgroup and its ancestors; None: no limit, or unknown."""
    limits = []
    for group in _with_parents(controller, proc, root):
        for file in files:
            with contextlib.suppress(OSError, ValueError):  # version 2 has "max" for no limit
                limits.append(int((group / file).read_text()))
    return min((limit for limit in limits if limit <= NO_LIMIT), default=None)


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
    for folder in _folders("cpu", proc, root):
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


def _quota(folder: Path) -> tuple[int, int]:
    """Return the quota of processor time per period, and the period, in microseconds; -1: no limit."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
        return (-1 if quota == "max" else int(quota)), int(period)
    quota = (folder / "cpu.cfs_quota_us").read_text()
    return int(quota), int((folder / "cpu.cfs_period_us").read_text())


def _folders(controller: str, proc: Path, root: Path) -> list[Path]:
    """Return the directories that may be this process's cgroup, for versions 1 and 2 of the interface.

    Inside a container, the group's own directory is often mounted at the root.
    """
    folders = []
    for controllers, relative in _lines(proc):
        if controllers == "":
            folders += [root / relative, root / "unified" / relative]
        elif controller in controllers.split(","):
            folders += [root / controller / relative, root / controllers / relative]
    return [*folders, root, root / controller]


def _with_parents(controller: str, proc: Path, root: Path) -> dict[Path, None]:
    """Return these directories and their ancestors."""
    return dict.fromkeys(
        group
        for folder in _folders(controller, proc, root)
        for group in (folder, *folder.parents)
        if group.is_relative_to(root)
    )
