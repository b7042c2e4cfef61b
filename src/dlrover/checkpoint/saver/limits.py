"""The amount of memory that this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

PROC_CGROUP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Files with limit and usage, in versions 2 and 1 of the control group interface."""


def available_memory(proc: Path = PROC_CGROUP, root: Path = ROOT) -> int:
    """Return the bytes left on the machine, or in the control group if that is less."""
    left = [int(psutil.virtual_memory().available)]
    for group in _groups(proc, root):
        for limit, use in _FILES:
            most, used = _number(group / limit), _number(group / use)
            if most is not None and used is not None:
                left.append(max(0, most - used))
    return min(left)


def _groups(proc: Path, root: Path) -> list[Path]:
    """Return this process's version 2 group and its ancestors, up to the root that a container mounts."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return [root]
    relative = next((line.partition("::")[2] for line in lines if line.startswith("0::")), "")
    group = root / relative.strip("/")
    return [parent for parent in (group, *group.parents) if parent.is_relative_to(root)]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
