"""Directories that two nodes share, and a store that can be away."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.directories import Directory

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]  # they need the extra "torch"


@pytest.fixture
def two_nodes(directory: Directory) -> list[Directory]:
    """The same directory twice: each of the two has a saver of its own, as nodes have."""
    directory.mkdir()
    for name in ("a", "b"):
        (directory / name).symlink_to(directory)
    return [Directory(directory / name) for name in ("a", "b")]


class S3Server:
    """An S3 server that keeps what it has when it is away."""

    def __init__(self) -> None:
        self._moto = None
        self.port = 0
        self.start()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._moto.start()
        self.port = self._moto.get_host_and_port()[1]

    def stop(self) -> None:
        if self._moto is not None:
            self._moto.stop()
        self._moto = None

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server with an empty bucket, for this process and those that it starts."""
    import s3fs

    for name, value in {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_server.port}", "AWS_MAX_ATTEMPTS": "1",
        "TMPDIR": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(f"bucket-{os.getpid()}")
    yield s3_server
    reset = urllib.request.Request(
        f"http://127.0.0.1:{s3_server.port}/moto-api/reset", method="POST"
    )
    urllib.request.urlopen(reset).close()
    s3fs.S3FileSystem.clear_instance_cache()
