"""Servers that a test runs for real: where their programs are, and a port for each."""

from __future__ import annotations

import os
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


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
