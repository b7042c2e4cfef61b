"""Control groups of nodes on this machine: each node in one of its own, with limits of memory and cores.

They lie below the group of the process that makes them, in version 1 of the kernel's interface one for each
controller. Their names tell who made them, so that what a killed process has left behind can be taken away.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from dlrover._util import cgroup, procs
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.platform import enter
from dlrover.spec.node import NodeSize

CONTROLLERS = ("memory", "cpu")
PREFIX = "dlrover"
PERIOD = 100_000
"""Microseconds over which cores are measured out."""
LEAST_QUOTA = 1000
"""Microseconds of a period; the kernel takes no less."""


class NodeGroups:
    """Makes and removes the groups of this process's nodes.

    Raises:
        ConfigurationError: this machine does not allow it.
    """

    def __init__(self, proc: Path = cgroup.PROC_CGROUP, root: Path = cgroup.ROOT) -> None:
        self._parents, self._tops = _parents(proc, root)
        self._maker = f"{PREFIX}-{os.getpid()}-{procs.start_time(os.getpid())}"

    def make(self, node_id: int, size: NodeSize) -> list[Path]:
        """Make a node's group; the files that a process enters it by.

        Raises:
            InfrastructureError: the kernel refuses.
        """
        try:
            made = [parent / self._name(node_id) for parent in self._parents]
            for group in made:
                group.mkdir()
                _limit(group, size)
        except OSError as error:
            self.remove(node_id)
            raise InfrastructureError(
                f"Node {node_id} cannot have a control group of its own: {error.filename}: {error.strerror}."
            ) from error
        return [group / "cgroup.procs" for group in made]

    def remove(self, node_id: int) -> bool:
        """Remove a node's group, if it is empty; whether it is gone."""
        kept = [p for p in self._parents if not _remove(p / self._name(node_id))]
        return not kept

    def oom_kills(self, node_id: int) -> int:
        """How often the kernel has killed a process of a node for want of memory."""
        found = [cgroup.oom_kills_of(parent / self._name(node_id)) for parent in self._parents]
        return max(found)

    def sweep(self) -> None:
        """Remove the empty groups that processes have left behind which are gone."""
        for group in [group for top in self._tops for group in _below(top)]:
            if _is_left_behind(group.name):
                _remove(group)

    def _name(self, node_id: int) -> str:
        return f"{self._maker}-{node_id}"


def check() -> None:
    """Make a group, let a process enter it, and remove it again.

    Raises:
        ConfigurationError: this machine does not allow it.
    """
    groups = NodeGroups()
    try:
        files = groups.make(-1, NodeSize(memory=1 << 30, cpu=0.1))
        tried = subprocess.run([*entering(files), "true"], check=False, capture_output=True)
    except InfrastructureError as error:
        raise ConfigurationError(str(error).replace("Node -1", "A node")) from error
    finally:
        groups.remove(-1)
    if tried.returncode != 0:
        raise ConfigurationError(f"The control group {files[0].parent} cannot be entered.")


def entering(files: Iterable[Path]) -> list[str]:
    """The words before a command that make it run in the groups that these files belong to."""
    return [sys.executable, "-I", "-S", enter.__file__, *map(str, files), "--"]


def _parents(proc: Path, root: Path) -> tuple[list[Path], list[Path]]:
    """The groups below which those of nodes are made, and the roots of their hierarchies."""
    own = cgroup.own_groups(proc, root)
    if all(name in own for name in CONTROLLERS):
        # Two controllers may share a hierarchy: one name of it is a link to the other.
        names = {(root / name).resolve(): name for name in ("cpuacct", *CONTROLLERS) if name in own}
        return [own[name] for name in names.values()], list(names)
    if "" not in own:
        raise ConfigurationError(
            f"This machine has no control groups for {' and '.join(CONTROLLERS)}: {root} lacks them."
        )
    return [_delegated(own[""], root)], [root]


def _delegated(own: Path, root: Path) -> Path:
    """Where version 2 of the interface lets this process make groups with limits.

    The children of a group that holds processes cannot have any, unless it is the machine's root: then they
    are made beside it, or else beside the next group above it that can have some.
    """
    controllers = own / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if not _has(controllers):
            controllers.write_text(" ".join(f"+{name}" for name in CONTROLLERS))
        return own
    above = own.parents[: len(own.relative_to(root).parts)]
    for group in above:
        if _has(group / "cgroup.subtree_control") and os.access(group, os.W_OK):
            return group
    raise ConfigurationError(
        f"The control group {own} cannot be divided, and none above it: they hold processes, or lack the "
        f"controllers {' and '.join(CONTROLLERS)}."
    )


def _has(subtree_control: Path) -> bool:
    try:
        return set(CONTROLLERS) <= set(subtree_control.read_text().split())
    except OSError:
        return False


def _limit(group: Path, size: NodeSize) -> None:
    """Set the limits of a group; those of controllers that it has not are left out."""
    if (group.parent / "cgroup.subtree_control").exists():
        memory, swap, cpu = "memory.max", "memory.swap.max", "cpu.max"
    else:
        memory, swap, cpu = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", ""
    if size.memory and (group.parent / "memory.stat").exists():
        (group / memory).write_text(str(size.memory))
        with contextlib.suppress(OSError):  # the kernel may not count it
            (group / swap).write_text("0" if swap == "memory.swap.max" else str(size.memory))
    quota = max(LEAST_QUOTA, round(size.cpu * PERIOD))
    if size.cpu and cpu:
        (group / cpu).write_text(f"{quota} {PERIOD}")
    elif size.cpu and (group.parent / "cpu.cfs_period_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(quota))


def _remove(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # processes run in it
        return False
    return True


def _below(top: Path) -> Iterator[Path]:
    """All groups below one, the innermost first."""
    for folder, _, _ in os.walk(top, topdown=False):
        if Path(folder).name.startswith(f"{PREFIX}-"):
            yield Path(folder)


def _is_left_behind(name: str) -> bool:
    """Whether a group's name is one of ours, of a process that is gone."""
    words = name.split("-")[1:]
    if len(words) not in (3, 4) or not all(word.isdecimal() for word in words[:2]):
        return False
    return not procs.runs(int(words[0]), int(words[1]))
