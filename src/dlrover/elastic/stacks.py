"""Lets this node's agent see the stacks of a worker, where no debugger may.

The agent sends a signal, on which `faulthandler` writes the stacks of all threads to a file in memory
that only the agent looks for. It runs no Python and waits for no lock, so it works in a process that hangs.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal

SIGNAL = signal.SIGRTMAX - 5
"""A real-time signal that nothing else is known to use; one without a handler would end the process."""
FILE_NAME = "dlrover-stacks"
FIRST_FD = 500
"""The file's descriptor is not among the low numbers, which programs count on, or close in bulk."""


def prepare() -> None:
    """Write stacks when asked to. Without room for another descriptor there are none."""
    try:
        low = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
        try:
            fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
        finally:
            os.close(low)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(SIGNAL, file=fd, all_threads=True)
    except OSError:
        return
