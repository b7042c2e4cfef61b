"""A worker's standard streams, which keep working when the disk with their files is full.

Output that the file does not take goes to memory of the agent, the *overflow*. The console shows it as it
shows the file. Apart from DLRover's own modules, only the standard library is imported here.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from dlrover._util.files import NO_ROOM

if TYPE_CHECKING:
    from typing_extensions import Buffer

OVERFLOW_LIMIT = 16 * 1024 * 1024
"""Bytes that an overflow holds; further output is lost. The agent frees output that the console has shown."""


def redirect(path: str, overflow: str, fd: int) -> None:
    """Make ``fd`` append to the file at ``path``, or to the overflow if the file cannot be opened."""
    try:
        opened = _append_to(path)
    except OSError:
        opened = _append_to(overflow)
    os.dup2(opened, fd)
    os.close(opened)


def use_overflows(stdout: str, stderr: str) -> None:
    """Replace this process's standard streams with streams that use the overflows."""
    sys.stdout = sys.__stdout__ = _text("<stdout>", 1, stdout, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text("<stderr>", 2, stderr, sys.stderr)  # type: ignore[misc]


class _Output(io.FileIO):
    """An output file with an overflow for output that its full disk does not take."""

    def __init__(self, fd: int, name: str, overflow: str) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.name = name
        self._overflow_path = overflow
        self._overflow = -1

    def write(self, data: Buffer, /) -> int:
        """Write all of ``data`` and return its length."""
        view = memoryview(data).cast("B")
        length = len(view)
        while view:
            view = view[self._write(view) :]
        return length

    def _write(self, view: memoryview) -> int:
        try:
            taken = super().write(view)
        except OSError as error:
            if error.errno not in NO_ROOM or not self._spill(view):
                raise
            return len(view)
        if taken is None:
            raise BlockingIOError(errno.EAGAIN, "the stream would block", 0)
        return taken

    def _spill(self, view: memoryview) -> bool:
        """Write ``view`` to the overflow, or drop it if that is full; return whether the overflow exists."""
        try:
            if self._overflow < 0:
                self._overflow = _append_to(self._overflow_path)
            if os.fstat(self._overflow).st_blocks * 512 < OVERFLOW_LIMIT:
                os.write(self._overflow, view)
        except OSError:
            return False  # the agent is gone
        return True


def _append_to(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _text(name: str, fd: int, overflow: str, like: TextIO) -> io.TextIOWrapper:
    """Return a text stream like the interpreter's own under ``-u``."""
    text = io.TextIOWrapper(
        _Output(fd, name, overflow), like.encoding, like.errors, "\n", write_through=True
    )
    text.mode = "w"  # type: ignore[misc]
    return text
