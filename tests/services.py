"""Servers that a test runs for real: where their programs are, and a port for each."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket

import pytest

_FOLDERS = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/usr/lib/postgresql/15/bin"


def program(name: str) -> str:
    """The path of a server's program, such as ``redis-server``.

    Skips the test if the machine has none, unless ``DLROVER_TEST_SERVICES``, a list with commas that
    ``scripts/services`` prints, says that it was installed for the tests.
    """
    found = shutil.which(name, path=_FOLDERS)
    if found is None:
        required = os.environ.get("DLROVER_TEST_SERVICES", "").split(",")
        assert name not in required, f"{name} was installed for the tests and is not there"
        pytest.skip(f"{name} is not installed: scripts/services")
    return found


PORTS = range(20_000, 32_768)
"""Linux gives none of them by itself, neither to a socket that connects nor to one that asks for any port.

Ray reserves lower ones, 10002 to 19999, for its workers.
"""


def free_port() -> int:
    """A port of this machine that nobody listens on, and that no other socket gets before a program has it."""
    while True:
        port = secrets.choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
