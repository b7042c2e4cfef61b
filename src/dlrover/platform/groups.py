"""Control groups that limit the memory and CPU of the nodes on this machine, one group for each node.

The groups lie below the group of the process that makes them. In version 1 of the kernel's interface, a
node has one group per controller. Each name identifies the maker, so that a killed process's groups can be
removed later.
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
from dlrover.spec.node import NodeLimits

CONTROLLERS = ("memory", "cpu")
PREFIX = "dlrover"
PERIOD = 100_000
"""CPU accounting period in microseconds."""
LEAST_QUOTA = 1000
"""Smallest CPU quota per period that the kernel accepts, in microseconds."""


class NodeGroups:
    """Makes and removes the control groups of this process's nodes.

    Raises:
        ConfigurationError: this machine does not allow it.
    """

    def __init__(self, proc: Path = cgroup.PROC_CGROUP, root: Path = cgroup.ROOT) -> None:
        self._parents, self._tops = _parents(proc, root)
        self._maker = f"{PREFIX}-{os.getpid()}-{procs.start_time(os.getpid())}"

    def make(self, node_id: int, size: NodeLimits) -> list[Path]:
        """Make a node's groups and return the ``cgroup.procs`` files through which a process joins them.

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
        """Remove a node's groups if they are empty; return whether all are gone."""
        kept = [p for p in self._parents if not _remove(p / self._name(node_id))]
        return not kept

    def oom_kills(self, node_id: int) -> int:
        """Return how often the kernel has killed one of a node's processes because it ran out of memory."""
        found = [cgroup.oom_kills_of(parent / self._name(node_id)) for parent in self._parents]
        return max(found)

    def sweep(self) -> None:
        """Remove the empty groups of dead processes."""
        for group in [group for top in self._tops for group in _below(top)]:
            if _is_left_behind(group.name):
                _remove(group)

    def _name(self, node_id: int) -> str:
        return f"{self._maker}-{node_id}"


def check() -> None:
    """Make a group, let a process join it, and remove the group.

    Raises:
        ConfigurationError: this machine does not allow it.
    """
    groups = NodeGroups()
    try:
        files = groups.make(-1, NodeLimits(memory=1 << 30, cpu=0.1))
        tried = subprocess.run([*entering(files), "true"], check=False, capture_output=True)
    except InfrastructureError as error:
        raise ConfigurationError(str(error).replace("Node -1", "A node")) from error
    finally:
        groups.remove(-1)
    if tried.returncode != 0:
        raise ConfigurationError(f"The control group {files[0].parent} cannot be entered.")


def entering(files: Iterable[Path]) -> list[str]:
    """Return the command prefix that runs a command in the groups of these ``cgroup.procs`` files."""
    return [sys.executable, "-I", "-S", enter.__file__, *map(str, files), "--"]


def _parents(proc: Path, root: Path) -> tuple[list[Path], list[Path]]:
    """Return the groups below which node groups are made, and the roots of their hierarchies."""
    own = cgroup.own_groups(proc, root)
    if all(name in own for name in CONTROLLERS):
        # Two controllers may share one hierarchy: one name is then a link to the other.
        names = {(root / name).resolve(): name for name in ("cpuacct", *CONTROLLERS) if name in own}
        return [own[name] for name in names.values()], list(names)
    if "" not in own:
        raise ConfigurationError(
            f"This machine has no control groups for {' and '.join(CONTROLLERS)}: {root} lacks them."
        )
    return [_delegated(own[""], root)], [root]


def _delegated(own: Path, root: Path) -> Path:
    """Return the group below which this process can make limited groups, in version 2 of the interface.

    Unless it is the machine's root, a group that holds processes cannot have limited children. In that case
    the nearest suitable group above it serves.
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


def _limit(group: Path, size: NodeLimits) -> None:
    """Set a group's limits; skip those of missing controllers."""
    if (group.parent / "cgroup.subtree_control").exists():
        memory, swap, cpu = "memory.max", "memory.swap.max", "cpu.max"
    else:
        memory, swap, cpu = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", ""
    if size.memory and (group.parent / "memory.stat").exists():
        (group / memory).write_text(str(size.memory))
        with contextlib.suppress(OSError):  # the kernel may not account for swap
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
    """Yield all DLRover groups below a group, innermost first."""
    for folder, _, _ in os.walk(top, topdown=False):
        if Path(folder).name.startswith(f"{PREFIX}-"):
            yield Path(folder)


def _is_left_behind(name: str) -> bool:
    """Return whether a group's name is that of a DLRover process that is gone."""
    words = name.split("-")[1:]
    if len(words) not in (3, 4) or not all(word.isdecimal() for word in words[:2]):
        return False
    return not procs.runs(int(words[0]), int(words[1]))
