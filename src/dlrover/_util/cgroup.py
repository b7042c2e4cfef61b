"""What the kernel's control groups tell of this process's memory."""

from __future__ import annotations

import re
from pathlib import Path

PROC_CGROUP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")

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
