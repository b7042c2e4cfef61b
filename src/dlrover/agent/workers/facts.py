"""Facts about a node for the diagnosis of a failed worker: messages in the kernel log, and full disks."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dlrover.spec.failure import FACTS_LIMIT

KERNEL_LOG = Path("/dev/kmsg")
RECORD_BYTES = 8192
"""Read size in bytes, above the longest record of the kernel log."""
RECORDS_READ = 4096
"""Maximum records read for one failure."""
GIB = 1024**3
FULL_BELOW = 0.01
"""Free share of a file system below which it counts as full, unless 1 GiB or more is free."""

_FAULT = re.compile(
    r"""\bxid\b|\bNVRM|\bNVLink|\bnvswitch|fallen\ off            # accelerators
      | \bamdgpu|\bHBM\b|\bdavinci|\bdevdrv                       #
      | oom-kill|out\ of\ memory|killed\ process                  # memory
      | hardware\ error|\bMCE\b|\bEDAC\b|\bECC\b                  # the machine
      | i/o\ error|read-only|ext4-fs\ error|xfs.*(error|shutdown) # disks
      | \bnfs:|not\ responding|stale                              # network file systems
      | segfault|trap\ invalid\ opcode|general\ protection        # processes
      | mlx5.*(error|fail|down)|link\ is\ down                    # networks
    """,
    re.VERBOSE | re.IGNORECASE,
)

_OUT_OF_MEMORY = re.compile(r"oom-kill|out of memory|killed process", re.IGNORECASE)
_VICTIM = re.compile(r"(?:\bkilled process |\bpid=)(\d+)", re.IGNORECASE)
PID_NAMESPACE = Path("/proc/self/ns/pid")
FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The kernel's fixed inode number of the first PID namespace, whose numbers its log uses."""


def may_be_fault(line: str) -> bool:
    """Return whether a line of the kernel log may indicate a fault."""
    return _FAULT.search(line) is not None


class NodeFacts:
    """The facts about this node since `begin`, as far as this user may read them."""

    def __init__(self, kernel_log: Path = KERNEL_LOG) -> None:
        self._kernel_log = kernel_log
        self._fd = -1
        self._lines: list[str] = []

    def begin(self) -> None:
        """Forget all facts and skip what the kernel has logged so far."""
        self._lines = []
        # This user may not read it: then there are no kernel facts.
        with contextlib.suppress(OSError):
            if self._fd < 0:
                self._fd = os.open(self._kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def gather(self, directory: Path, killed: int = 0) -> tuple[str, ...]:
        """Return the latest facts, at most `FACTS_LIMIT`. Takes milliseconds.

        Args:
            directory: of the file systems, only that of this directory is checked.
            killed: pid of a worker that a signal killed; the out-of-memory kills of other processes are left
                out, where the kernel's process numbers are those of this machine's processes.
        """
        self._lines = [*self._lines, *self._new_lines()][-FACTS_LIMIT:]
        lines = self._lines
        if killed and _numbers_are_the_kernels():
            lines = [line for line in lines if not _kills_another(line, killed)]
        return tuple([*lines, *_full_file_system(directory)][-FACTS_LIMIT:])

    def close(self) -> None:
        """Close the kernel log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _new_lines(self) -> Iterator[str]:
        """Yield the kernel's messages since the last call that may indicate a fault."""
        for _ in range(RECORDS_READ if self._fd >= 0 else 0):
            try:
                record = os.read(self._fd, RECORD_BYTES)
            except BrokenPipeError:
                continue  # the kernel dropped records; the next read continues after them
            except OSError:
                return  # no more records
            if not record:
                return
            message = record.decode(errors="replace").partition(";")[2].partition("\n")[0]
            if may_be_fault(message):
                yield message


def _numbers_are_the_kernels() -> bool:
    """Return whether this process is in the first PID namespace; a container is usually in another one."""
    try:
        return PID_NAMESPACE.stat().st_ino == FIRST_PID_NAMESPACE
    except OSError:
        return False


def _kills_another(line: str, pid: int) -> bool:
    """Return whether a line is about the out-of-memory killer, but not about the end of process ``pid``."""
    return bool(_OUT_OF_MEMORY.search(line)) and str(pid) not in _VICTIM.findall(line)


def _full_file_system(directory: Path) -> list[str]:
    try:
        status = os.statvfs(directory)
    except OSError:
        return []
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    if free >= min(size * FULL_BELOW, GIB):
        return []
    return [f"disk: {free / GIB:.1f} GiB free of {size / GIB:.1f} GiB in {directory}"]
