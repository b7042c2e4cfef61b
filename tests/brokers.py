"""Brokers that tests run for real, one of each for a session; a test takes streams of its own in them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.services import program

PR_SET_PDEATHSIG = 1
READY = 60.0
"""Seconds until a broker answers."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _dies_with_the_tests() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def running(command: list[str], port: int, folder: Path, **env: str) -> Iterator[None]:
    """A broker, from when it listens until the end of the block."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, preexec_fn=_dies_with_the_tests,
            env={**os.environ, **env}, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + READY
        while not _listens(port):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, f"{command[0]} does not listen"
            time.sleep(0.02)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dlrover-broker-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def redis_running() -> Iterator[int]:
    """The port of a Redis that keeps nothing on disk."""
    port = free_port()
    command = [program("redis-server"), "--port", str(port), "--bind", "127.0.0.1"]
    with _folder() as folder, running([*command, "--save", ""], port, folder):
        yield port


@contextlib.contextmanager
def nats_running() -> Iterator[int]:
    """The port of a NATS server with JetStream."""
    port = free_port()
    with _folder() as folder:
        command = [program("nats-server"), "-a", "127.0.0.1", "-p", str(port)]
        with running([*command, "-js", "-sd", str(folder / "data")], port, folder):
            yield port


@pytest.fixture(scope="session")
def redis_port() -> Iterator[int]:
    pytest.importorskip("redis")
    with redis_running() as port:
        yield port


@pytest.fixture(scope="session")
def nats_port() -> Iterator[int]:
    pytest.importorskip("nats")
    with nats_running() as port:
        yield port


def fresh() -> str:
    """A name that no other test has."""
    return f"s{uuid.uuid4().hex[:10]}"
