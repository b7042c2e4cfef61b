"""What a node can tell of itself when one of its workers fails: the kernel's log, and full disks."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dlrover.spec.failure import FACTS_LIMIT

KERNEL_LOG = Path("/dev/kmsg")
RECORD_BYTES = 8192
"""More than the longest record of the kernel's log."""
RECORDS_READ = 4096
"""Records looked at for one failure; a kernel that logs faster than that is cut short."""
GIB = 1024**3
FULL_BELOW = 0.01
"""Free share of a file system below which that is a fact, unless it is more than a GiB."""

_TELLING = re.compile(
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


def tells(line: str) -> bool:
    """Whether a line of the kernel's log may tell of a fault."""
    return _TELLING.search(line) is not None


class NodeFacts:
    """Facts about this node since `begin`, as far as this user may see them."""

    def __init__(self, kernel_log: Path = KERNEL_LOG) -> None:
        self._kernel_log = kernel_log
        self._fd = -1
        self._lines: list[str] = []

    def begin(self) -> None:
        """Forget what was; what the kernel logged before is no fact about what comes."""
        self._lines = []
        with contextlib.suppress(
            OSError
        ):  # this user may not read it: then the kernel tells nothing
            if self._fd < 0:
                self._fd = os.open(self._kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def gather(self, directory: Path) -> tuple[str, ...]:
        """The facts, the latest ones where there are many. Takes milliseconds.

        Of file systems, the one of ``directory`` is looked at.
        """
        self._lines = [*self._lines, *self._new_lines()][-FACTS_LIMIT:]
        return tuple([*self._lines, *_full_file_system(directory)][-FACTS_LIMIT:])

    def close(self) -> None:
        """Close the kernel's log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _new_lines(self) -> Iterator[str]:
        """What the kernel has logged since the last look, as far as it may tell of a fault."""
        for _ in range(RECORDS_READ if self._fd >= 0 else 0):
            try:
                record = os.read(self._fd, RECORD_BYTES)
            except BrokenPipeError:
                continue  # the kernel has dropped records; the next read goes on behind them
            except OSError:
                return  # there is no more
            if not record:
                return
            message = record.decode(errors="replace").partition(";")[2].partition("\n")[0]
            if tells(message):
                yield message


def _full_file_system(directory: Path) -> list[str]:
    try:
        status = os.statvfs(directory)
    except OSError:
        return []
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    if free >= min(size * FULL_BELOW, GIB):
        return []
    return [f"disk: {free / GIB:.1f} GiB free of {size / GIB:.1f} GiB in {directory}"]
