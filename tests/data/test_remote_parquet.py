"""Parquet files of a web server that fails: what it does not answer costs no row."""

from __future__ import annotations

import io
import re
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dlrover.data import Parquet
from dlrover.data.records import Records
from dlrover.data.sources import waiting
from dlrover.errors import ConfigurationError, InfrastructureError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
fsspec = pytest.importorskip("fsspec")
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
        #: how it fails, and how often
        self.failure, self.times = "", 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/a.parquet"

    def fail(self, how: str, times: int = 1_000_000) -> None:
        self.failure, self.times = how, times


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server, failure = self.server, ""
        if server.times:
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


def test_a_server_that_fails_at_first_is_no_mistake_of_the_program(server: Server) -> None:
    for failure in ("429", "503", "cut"):
        server.fail(failure)
        with pytest.raises(InfrastructureError, match=FAILURES[failure]):
            Parquet(server.url)
    server.fail("404")
    with pytest.raises(ConfigurationError, match="Not Found"):
        Parquet(server.url)


@pytest.mark.parametrize("failure", ["404", "503"])
def test_no_password_of_a_url_is_shown(server: Server, monkeypatch, caplog, failure: str) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.2)
    secret = "geheim"
    url = server.url.replace("http://", f"http://me:{secret}@")
    rows = Parquet(url)
    rows.close()
    server.fail(failure)
    for read in (
        lambda: rows[0],
        lambda: Parquet(url),
        lambda: Parquet(f"{url}?signature={secret}"),
    ):
        with pytest.raises((ConfigurationError, InfrastructureError)) as raised:
            read()
        told = "".join(traceback.format_exception(raised.value))
        assert "127.0.0.1" in told
        assert secret not in told
    assert secret not in caplog.text


def test_a_file_that_is_replaced_by_something_else_costs_no_row(server: Server) -> None:
    rows = Parquet(server.url)
    rows.close()
    server.file = bytes(len(server.file))
    data = Records(rows)
    with pytest.raises(InfrastructureError, match="is no Parquet file any more"):
        list(data)
    data.close()
