"""Brokers that tests run for real, one of each for a session; a test takes streams of its own in them."""

from __future__ import annotations

import asyncio
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
            command, stdout=log, stderr=log, cwd=folder, preexec_fn=_dies_with_the_tests,  # noqa: PLW1509 - it only calls prctl
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


@dataclass
class Topic:
    """A stream of one broker."""

    url: str
    send: Callable[[Sequence[int]], None]
    #: remove the oldest messages until this many are left
    keep: Callable[[int], None]


def redis_topic(port: int) -> Topic:
    import redis

    name = fresh()
    client = redis.Redis(port=port)

    def send(numbers: Sequence[int]) -> None:
        with client.pipeline() as pipe:
            for number in numbers:
                pipe.xadd(name, {"n": number})
            pipe.execute()

    url = f"redis://127.0.0.1:{port}/0?stream={name}"
    return Topic(url, send, lambda count: client.xtrim(name, maxlen=count, approximate=False))


def nats_topic(port: int) -> Topic:
    import nats

    name = fresh()

    async def do(work) -> None:
        client = await nats.connect(f"nats://127.0.0.1:{port}")
        await work(client.jetstream())
        await client.close()

    def send(numbers: Sequence[int]) -> None:
        async def work(stream) -> None:
            for number in numbers:
                await stream.publish(f"{name}.x", str(number).encode())

        asyncio.run(do(work))

    asyncio.run(do(lambda stream: stream.add_stream(name=name, subjects=[f"{name}.*"])))
    return Topic(
        f"nats://127.0.0.1:{port}/{name}",
        send,
        lambda count: asyncio.run(do(lambda stream: stream.purge_stream(name, keep=count))),
    )


TOPICS = {"redis": redis_topic, "nats": nats_topic}
