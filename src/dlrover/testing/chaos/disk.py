"""A full disk: a nameless file takes the space and vanishes with its process."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from dlrover.errors import ConfigurationError

GIB = 1 << 30
LARGEST = 4 * GIB
"""Most bytes of a file system that may be filled: it must be made for this purpose."""


def check_small(directory: Path) -> None:
    """Refuse a file system that may serve another purpose.

    Raises:
        ConfigurationError: it is too large, or the directory does not exist.
    """
    try:
        facts = os.statvfs(directory)
    except OSError as error:
        raise ConfigurationError(
            f"--checkpoint-dir {directory}: {error.strerror}; fill-disk takes an existing directory."
        ) from error
    size = facts.f_blocks * facts.f_frsize
    if size > LARGEST:
        raise ConfigurationError(
            f"--checkpoint-dir {directory} lies on a file system of {size / GIB:.1f} GiB; fill-disk "
            f"takes one of at most {LARGEST // GIB} GiB, such as a tmpfs mounted for it."
        )


class Filling:
    """File that takes all free space on a directory's file system until it is closed."""

    def __init__(self, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - kept open
        self.nbytes = 0
        self._fill(os.statvfs(directory))

    def _fill(self, facts: os.statvfs_result) -> None:
        """Allocate pieces, halving their size when they no longer fit."""
        piece = facts.f_bavail * facts.f_frsize
        while piece >= facts.f_frsize:
            if self._take(piece):
                self.nbytes += piece
            else:
                piece //= 2

    def _take(self, piece: int) -> bool:
        try:
            os.posix_fallocate(self._file.fileno(), self.nbytes, piece)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return False
        return True

    def close(self) -> None:
        """Free the space."""
        self._file.close()
