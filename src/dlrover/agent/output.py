"""A worker's standard streams, which go on where the disk of their files is full.

What the file does not take goes to memory of the agent, its *overflow*, which the console shows as it shows
the file. Besides our own, only the standard library is imported here.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from dlrover._util.files import NO_ROOM

if TYPE_CHECKING:
    from typing import TextIO

    from typing_extensions import Buffer

OVERFLOW_LIMIT = 16 * 1024 * 1024
"""Bytes that may wait in an overflow; the agent frees what the console has shown. The rest is lost."""


def redirect(path: str, overflow: str, fd: int) -> None:
    """Have ``fd`` append to the file at ``path``, or to the overflow if that cannot be opened."""
    try:
        opened = _append_to(path)
    except OSError:
        opened = _append_to(overflow)
    os.dup2(opened, fd)
    os.close(opened)


def use_overflows(stdout: str, stderr: str) -> None:
    """Replace this process's standard streams by ones that know their overflows."""
    sys.stdout = sys.__stdout__ = _text("<stdout>", 1, stdout, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text("<stderr>", 2, stderr, sys.stderr)  # type: ignore[misc]


class _Output(io.FileIO):
    """A file that another one stands in for while its disk is full."""

    def __init__(self, fd: int, name: str, overflow: str) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.name = name
        self._overflow_path = overflow
        self._overflow = -1

    def write(self, data: Buffer, /) -> int:
        """Write all of ``data``; its length."""
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
        """Whether there is an overflow for what the file does not take."""
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
    """A text stream as the interpreter makes it with ``-u``."""
    text = io.TextIOWrapper(
        _Output(fd, name, overflow), like.encoding, like.errors, "\n", write_through=True
    )
    text.mode = "w"  # type: ignore[misc]
    return text
