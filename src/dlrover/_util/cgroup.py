"""What the kernel's control groups tell of this process's memory and processors."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

PROC_CGROUP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")

NO_LIMIT = 1 << 60
"""Bytes; version 1 of the interface has a number beyond where there is no limit."""
_OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(proc: Path = PROC_CGROUP, root: Path = ROOT) -> int:
    """How often the out-of-memory killer struck in this process's memory cgroup; 0 if unknown."""
    for path in _event_files(proc, root):
        try:
            found = _OOM_KILL.search(path.read_text())
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def memory(proc: Path = PROC_CGROUP, root: Path = ROOT) -> tuple[int, int] | None:
    """Bytes that this process's memory cgroup uses, less what the kernel can drop, and its limit.

    None where there is no limit, or nothing to be known.
    """
    for directory in _memory_directories(proc, root):
        for used, limit, dropped in (
            ("memory.current", "memory.max", "inactive_file"),
            ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
        ):
            try:
                most = (directory / limit).read_text().strip()
                if not most.isdecimal() or int(most) > NO_LIMIT:
                    continue
                now = int((directory / used).read_text())
                counts = dict(
                    line.split() for line in (directory / "memory.stat").read_text().splitlines()
                )
            except (OSError, ValueError):
                continue
            return max(0, now - int(counts.get(dropped, 0))), int(most)
    return None


def _memory_directories(proc: Path, root: Path) -> list[Path]:
    return list(dict.fromkeys(path.parent for path in _event_files(proc, root)))


def processors(proc: Path = PROC_CGROUP, root: Path = ROOT) -> int:
    """How many processors this process may use, 1 at least: those of its affinity, or its quota if less."""
    usable = len(os.sched_getaffinity(0))
    for folder in _processor_folders(proc, root):
        try:
            quota, period = _quota(folder)
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            usable = min(usable, math.ceil(quota / period))
    return max(1, usable)


def _quota(folder: Path) -> tuple[int, int]:
    """Microseconds of processor time in each period; -1: without a limit."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
        return (-1 if quota == "max" else int(quota)), int(period)
    quota = (folder / "cpu.cfs_quota_us").read_text()
    return int(quota), int((folder / "cpu.cfs_period_us").read_text())


def _processor_folders(proc: Path, root: Path) -> list[Path]:
    """Where version 1 and version 2 of the interface keep the quota."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        lines = []
    folders = [root, root / "cpu"]
    for line in lines:
        _, controllers, group = line.split(":", 2)
        relative = group.lstrip("/")
        if controllers == "":
            folders.append(root / relative)
        elif "cpu" in controllers.split(","):
            folders.append(root / "cpu" / relative)
    return folders


def _event_files(proc: Path, root: Path) -> list[Path]:
    """Where version 1 and version 2 of the interface count the kills."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        relative = group.lstrip("/")
        if controllers == "":
            files.append(root / relative / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(root / "memory" / relative / "memory.oom_control")
    # Inside a container the group's own directory is often mounted at the root.
    return [*files, root / "memory.events", root / "memory" / "memory.oom_control"]
