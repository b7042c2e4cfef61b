"""Stack dumps of a worker for this node's agent, for systems where no debugger may attach.

The agent sends a signal, on which `faulthandler` writes the stacks of all threads to an in-memory file that
only the agent reads. This runs no Python code and takes no lock, so it works in a hanging process.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal

from dlrover._util import kernel

SIGNAL = signal.SIGRTMAX - 5
"""A real-time signal without known other users; without a handler, it would end the process."""
FILE_NAME = "dlrover-stacks"
FIRST_FD = 500
"""Lowest descriptor number of the file; programs count on the low numbers, or close them in bulk."""


def prepare() -> None:
    """Write stacks on `SIGNAL`; do nothing if no descriptor is free."""
    try:
        low = kernel.memfd_create(FILE_NAME)
        try:
            fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
        finally:
            os.close(low)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(SIGNAL, file=fd, all_threads=True)
    except OSError:
        return
