"""Atomic writes of files that other processes read, also on a disk that may be full."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write that can succeed once there is free space again."""


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace ``path`` so that a reader sees the old content or all of the new, never a part.

    If the disk is full, use the space reserved for ``path``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        _fill(fd, data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno not in NO_ROOM or not _replace_by_reserved(path, data):
            raise
    else:
        release(path)


def reserve(path: Path, size: int) -> None:
    """Reserve space for a later `write_atomically` of at most ``size`` bytes to ``path``.

    Raises:
        OSError: the space is not available.
    """
    fd = os.open(_reserved(path), os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def release(path: Path) -> None:
    """Release the space reserved for ``path``, if it is unused and its volume allows that."""
    with contextlib.suppress(OSError):  # it takes room, and nothing else
        _reserved(path).unlink()


def _reserved(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")


def _replace_by_reserved(path: Path, data: bytes) -> bool:
    """Write into the file that reserves space for ``path``; return False if it is missing or too small."""
    try:
        fd = os.open(_reserved(path), os.O_WRONLY)
    except FileNotFoundError:
        return False
    if os.fstat(fd).st_size < len(data):
        os.close(fd)
        return False
    _fill(fd, data)
    _reserved(path).replace(path)
    return True


def _fill(fd: int, data: bytes) -> None:
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.ftruncate(fd, len(data))
        os.fsync(fd)
