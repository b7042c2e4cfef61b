"""Parquet files of a web server that fails: what it does not answer costs no row."""

from __future__ import annotations

import errno
import ftplib
import io
import os
import re
import ssl
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

import pytest

from dlrover.data import Parquet
from dlrover.data.records import Records
from dlrover.data.sources import waiting
from dlrover.errors import ConfigurationError, InfrastructureError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
fsspec = pytest.importorskip("fsspec")
FSTimeoutError = pytest.importorskip("fsspec.exceptions").FSTimeoutError
pytest.importorskip("aiohttp")

pytestmark = pytest.mark.slow

ROWS = 60


class Server(ThreadingHTTPServer):
    """A web server with one file, whose failures a test sets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        buffer = io.BytesIO()
        columns = {"id": list(range(ROWS)), "text": [str(row) * 1000 for row in range(ROWS)]}
        pq.write_table(pa.table(columns), buffer, row_group_size=10, compression="none")
        self.file = buffer.getvalue()
        #: how it fails, how often, and after how many answers
        self.failure, self.times, self.after = "", 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/a.parquet"

    def fail(self, how: str, times: int = 1_000_000, after: int = 0) -> None:
        self.failure, self.times, self.after = how, times, after


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server, failure = self.server, ""
        if server.after:
            server.after -= 1
        elif server.times:
            server.times, failure = server.times - 1, server.failure
        if failure.isdigit():
            self.send_response(int(failure))
            self.send_header("Retry-After", "1")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = len(server.file)
        found = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = (int(found[1]), int(found[2] or size - 1) + 1) if found else (0, size)
        data = server.file[start:stop]
        sent = data[: len(data) // 2] if failure else data
        self.send_response(206 if found else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        declared = data if self.command == "HEAD" or failure == "cut" else sent
        self.send_header("Content-Length", str(len(declared)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(sent)
        self.close_connection = bool(failure)


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    # A reader of the whole file at once would notice nothing later.
    monkeypatch.setitem(fsspec.config.conf, "http", {"block_size": 1000})
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


FAILURES = {
    "429": "Too Many Requests",
    "503": "Service Unavailable",
    "404": "Not Found",
    "cut": "not completed|Not enough data",
    "short": "sends less than it has",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_costs_no_row(server: Server, monkeypatch, failure: str) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.3)
    data = Records(Parquet(server.url))
    rows = iter(data)
    got = [next(rows)["id"] for _ in range(15)]
    server.fail(failure)
    with pytest.raises(InfrastructureError, match=f"cannot be read: .*({FAILURES[failure]})"):
        got.extend(row["id"] for row in rows)
    server.fail("")
    monkeypatch.setattr(waiting, "PATIENCE", 20.0)
    monkeypatch.setattr(waiting, "RETRY", (0.001, 0.001))
    for row in data:
        got.append(row["id"])
        server.fail(failure, 2)
    data.close()
    assert got == list(range(ROWS))


@pytest.mark.parametrize("query", ["", "?signature=x*"])
@pytest.mark.parametrize("after", range(3))
def test_a_server_that_fails_at_first_is_no_mistake_of_the_program(
    server: Server, query: str, after: int
) -> None:
    for failure in ("429", "503", "cut"):
        server.fail(failure, after=after)
        with pytest.raises(InfrastructureError, match=FAILURES[failure]):
            Parquet(server.url + query)
    server.fail("404", after=after)
    with pytest.raises(ConfigurationError, match="Not Found"):
        Parquet(server.url + query)


@pytest.mark.parametrize("failure", ["404", "503"])
def test_no_password_of_a_url_is_shown(server: Server, monkeypatch, caplog, failure: str) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.2)
    secret = "geheim"
    url = server.url.replace("http://", f"http://me:{secret}@") + f"?signature={secret}"
    rows = Parquet(url)
    for read in (lambda: rows[0], lambda: Parquet(url)):
        server.fail("")
        rows.close()
        assert rows[0]["id"] == 0
        rows.close()
        server.fail(failure)
        with pytest.raises((ConfigurationError, InfrastructureError)) as raised:
            read()
        said = "".join(traceback.format_exception(raised.value))
        assert re.search("127.0.0.1.*(Service Unavailable|Not Found)", said)
        assert secret not in said
    assert "retrying" in caplog.text
    assert secret not in caplog.text


def test_no_password_of_a_wrong_url_is_shown() -> None:
    secret = "geheim"
    with pytest.raises(ConfigurationError, match=r"^ftp://host:x/a is no URL") as raised:
        Parquet(f"ftp://me:{secret}@host:x/a")
    assert secret not in "".join(traceback.format_exception(raised.value))


def test_a_file_that_is_replaced_by_something_else_costs_no_row(server: Server) -> None:
    rows = Parquet(server.url)
    rows.close()
    server.file = bytes(len(server.file))
    data = Records(rows)
    with pytest.raises(InfrastructureError, match="is no Parquet file any more"):
        list(data)
    data.close()


class Flaky(fsspec.AbstractFileSystem):
    """Local files of a client that fails with an error of its own, when it is made or when it opens a file."""

    protocol = "flaky"
    cachable = False
    error: Exception | None = None
    at_once = False

    def __init__(self, **options) -> None:
        super().__init__(**options)
        if self.error and self.at_once:
            raise self.error

    def info(self, path: str, **_) -> dict:
        return {"name": path, "size": os.path.getsize(path), "type": "file"}

    def _open(self, path: str, mode: str = "rb", **_) -> BinaryIO:
        if self.error:
            raise self.error
        return io.BytesIO(Path(path).read_bytes())


@pytest.fixture(params=[False, True], ids=["opens", "made"])
def flaky(request, monkeypatch, tmp_path) -> str:
    """The URL of a file."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(Flaky, "at_once", request.param)
    monkeypatch.setattr(Flaky, "error", None)
    pq.write_table(pa.table({"id": list(range(ROWS))}), tmp_path / "a.parquet", row_group_size=10)
    return f"flaky://{tmp_path}/a.parquet"


ERRORS = [
    (ftplib.error_temp("421 Service not available"), "421 Service not available"),
    (FSTimeoutError(), "FSTimeoutError"),
    (RuntimeError("credentials.parquet is away"), "credentials.parquet is away"),
    (ssl.SSLError(1, "handshake failure"), "handshake failure"),
    (OSError(errno.EIO, "InternalError"), "InternalError"),
]


@pytest.mark.parametrize(("error", "text"), ERRORS)
def test_a_client_that_fails_costs_no_row(flaky: str, monkeypatch, error, text: str) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.01)
    Flaky.error = error
    with pytest.raises(InfrastructureError, match=rf"parquet cannot be read: {text}\.$"):
        Parquet(flaky)
    Flaky.error = None
    rows = Parquet(flaky)
    data = Records(rows)
    reader = iter(data)
    got = [next(reader)["id"] for _ in range(15)]
    rows.close()
    Flaky.error = error
    with pytest.raises(InfrastructureError, match=rf"parquet cannot be read: {text}\.$"):
        got.extend(row["id"] for row in reader)
    Flaky.error = None
    got.extend(row["id"] for row in data)
    data.close()
    assert got == list(range(ROWS))


def test_an_expired_token_costs_no_row_and_is_the_program_s_at_first(
    flaky: str, monkeypatch
) -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    monkeypatch.setattr(waiting, "PATIENCE", 0.01)
    rows = Parquet(flaky)
    rows.close()
    for error in (PermissionError("ExpiredToken"), exceptions.NoCredentialsError()):
        Flaky.error = error
        with pytest.raises(InfrastructureError, match="cannot be read"):
            rows[0]
        with pytest.raises(ConfigurationError, match="cannot be read"):
            Parquet(flaky)
