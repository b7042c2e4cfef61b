"""System calls that `os` lacks in some interpreters: it has those that the C library of its build machine had.

Interpreters of uv and conda are built for glibc 2.17, and lack these, or their constants.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

MFD_CLOEXEC = 1
MFD_ALLOW_SEALING = 2
_F_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_PIDFD_OPEN = 434
"""Number of the system call on x86-64, 64-bit ARM, POWER, s390x and RISC-V."""


def memfd_create(name: str, flags: int = MFD_CLOEXEC) -> int:
    """Return the descriptor of a new file in anonymous memory.

    Raises:
        OSError: The kernel or a sandbox refuses it, or the C library is older than glibc 2.27.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)  # noqa: TID251
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return _descriptor(library.memfd_create(name.encode(), flags))


def fix_size(fd: int) -> None:
    """Let no process change the size of a file in anonymous memory, which was made with `MFD_ALLOW_SEALING`."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)


def pidfd_open(pid: int) -> int:
    """Return a descriptor of a process, which is ready for reading once the process has ended.

    Raises:
        ProcessLookupError: There is no such process.
        OSError: The kernel (before Linux 5.3) or a sandbox refuses it.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)  # noqa: TID251
    return _descriptor(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, pid, 0))


def _descriptor(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.set_inheritable(result, False)
    return result
