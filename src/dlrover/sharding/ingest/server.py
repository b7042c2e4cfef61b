"""The endpoint: HTTP, with a token on every request.

``POST /v1/streams/NAME/records[?partition=N]`` keeps a batch of records: a JSON value a line
(``application/x-ndjson``), or an array of byte strings (``application/msgpack``). The headers
``Dlrover-Producer`` and ``Dlrover-Sequence`` make it safe to repeat. The answer comes when the records are on
the disk. ``GET /v1/streams/NAME`` tells the bounds of each partition, ``GET .../records?partition=&start=&stop=
&most=`` reads, and ``DELETE .../records?partition=&before=`` says that nobody reads these any more.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from dlrover.sharding.ingest.log import Refused
from dlrover.sharding.ingest.streams import Streams

logger = logging.getLogger(__name__)

MAX_BODY = 8 * 1024 * 1024
"""Bytes of one batch."""
MAX_PRODUCER = 200
IN_FLIGHT = 16
"""Batches that are taken in at a time; more are asked to come again. Memory is bounded by their bodies."""
CONNECTIONS = 256
IDLE = 60.0
"""Seconds after which a silent connection is closed."""
RETRY_AFTER = 1
"""Seconds after which a producer that was refused should come again."""
TIDY_INTERVAL = 60.0
"""Seconds between two looks at what is too old."""
_AGAIN = {429, 503, 507}
NDJSON, MSGPACK = "application/x-ndjson", "application/msgpack"


class Answer(NamedTuple):
    """What a request gets."""

    status: int
    body: Any
    """A value, which is sent as JSON; bytes are sent as they are, for they are MessagePack."""


class Server(ThreadingHTTPServer):
    """Serves `Streams`, a thread for each connection.

    Args:
        address: host and port to listen on; port 0: any.
        streams: what it serves.
        token: what each request has to know.
        tls: the server's side of TLS; None: without.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        streams: Streams,
        token: str,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.streams, self.token = streams, token
        self.in_flight = threading.BoundedSemaphore(IN_FLIGHT)
        self._connections = threading.BoundedSemaphore(CONNECTIONS)
        self._tls = tls
        self._ended = threading.Event()
        self._open: set[socket.socket] = set()
        super().__init__(address, Handler)
        threading.Thread(target=self._tidy, name="dlrover-ingest-tidy", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, if there are not too many."""
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In that thread."""
        try:
            request.settimeout(IDLE)
            if self._tls is not None:  # here, so that a slow handshake keeps nobody else waiting
                request = self._tls.wrap_socket(request, server_side=True)
            self._open.add(request)
            super().process_request_thread(request, client_address)
        except OSError as error:
            logger.info("A connection from %s ended: %s", client_address[0], error)
            self.shutdown_request(request)
        finally:
            self._open.discard(request)
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection broke, or we did."""
        logger.info("A request from %s failed", client_address[0], exc_info=sys.exc_info())

    def _tidy(self) -> None:
        while not self._ended.wait(TIDY_INTERVAL):
            self.streams.tidy()

    def server_close(self) -> None:
        """Let the port and the connections go."""
        self._ended.set()
        super().server_close()
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # its thread sees the end, and closes it


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server  # type: ignore[mutable-override]  # it is made by no other

    def do_GET(self) -> None:
        """Tell the bounds of a stream, or read records."""
        self._serve(self._get)

    def do_POST(self) -> None:
        """Keep a batch."""
        self._serve(self._post)

    def do_DELETE(self) -> None:
        """Nobody reads these any more."""
        self._serve(self._delete)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests are not logged."""

    def _serve(self, what: Any) -> None:
        parts = urlsplit(self.path)
        self._query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self.close_connection = True  # its body is not read
            self._send(Answer(401, {"error": "the token is missing or wrong"}))
            return
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        if (
            words[:2] != ["v1", "streams"]
            or len(words) not in (3, 4)
            or words[3:] not in ([], ["records"])
        ):
            self._refuse(404, "there is nothing here; see /v1/streams/NAME/records")
            return
        self._name, self._records = words[2], len(words) == 4
        if self.server.streams.logs(self._name) is None:
            self._refuse(404, f"there is no stream {self._name}")
            return
        try:
            self._send(what())
        except _BadRequestError as error:
            self._refuse(error.status, str(error))

    # ---- requests

    def _post(self) -> Answer:
        if not self._records:
            raise _BadRequestError(405, "push to .../records")
        producer = self.headers.get("Dlrover-Producer", "")
        if not 0 < len(producer) <= MAX_PRODUCER:
            raise _BadRequestError(
                400, f"Dlrover-Producer must have 1 to {MAX_PRODUCER} characters"
            )
        sequence = _number(self.headers.get("Dlrover-Sequence"), "Dlrover-Sequence")
        partition = self._partition() if "partition" in self._query else None
        if not self.server.in_flight.acquire(blocking=False):
            return self._later(Refused(429, f"{IN_FLIGHT} batches are being taken in"))
        try:
            records = self._body()
            if not records:
                raise _BadRequestError(400, "a batch must have a record")
            partition, found = self.server.streams.append(
                self._name, partition, producer, sequence, records
            )
        finally:
            self.server.in_flight.release()
        if isinstance(found, Refused):
            return self._later(found)
        return Answer(200, {"partition": partition, **found._asdict()})

    def _get(self) -> Answer:
        logs = self.server.streams.logs(self._name) or []
        if not self._records:
            return Answer(200, {"partitions": [[log.first, log.end] for log in logs]})
        log = logs[self._partition()]
        start = _number(self._query.get("start"), "start")
        stop = _number(self._query.get("stop", str(log.end)), "stop")
        most = _number(self._query.get("most", "1000"), "most")
        first, records = log.read(start, stop, most)
        return Answer(200, msgspec.msgpack.encode({"first": first, "records": records}))

    def _delete(self) -> Answer:
        before = _number(self._query.get("before"), "before")
        partition = self._partition()
        self.server.streams.drop(self._name, partition, before)
        return Answer(200, {"first": (self.server.streams.logs(self._name) or [])[partition].first})

    def _partition(self) -> int:
        partition = _number(self._query.get("partition"), "partition")
        count = len(self.server.streams.logs(self._name) or [])
        if partition >= count:
            raise _BadRequestError(404, f"the stream {self._name} has {count} partitions")
        return partition

    def _body(self) -> list[bytes]:
        if "Content-Length" not in self.headers:
            raise _BadRequestError(411, "Content-Length is missing")
        length = _number(self.headers["Content-Length"], "Content-Length")
        if length > MAX_BODY:
            raise _BadRequestError(413, f"a batch has {MAX_BODY} bytes at most")
        data = self.rfile.read(length)
        if len(data) < length:
            raise _BadRequestError(400, "the batch is cut off")
        self._read = True
        kind = self.headers.get_content_type()
        try:
            if kind == MSGPACK:
                return msgspec.msgpack.decode(data, type=list[bytes])
            if kind == NDJSON:
                lines = [line for line in data.split(b"\n") if line.strip()]
                for line in lines:
                    msgspec.json.decode(line)
                return lines
        except msgspec.DecodeError as error:
            raise _BadRequestError(400, f"the batch cannot be read: {error}") from error
        raise _BadRequestError(415, f"Content-Type is {kind}; {NDJSON} and {MSGPACK} are accepted")

    # ---- answers

    _read = False

    def _later(self, refused: Refused) -> Answer:
        return Answer(refused.status, {"error": refused.reason})

    def _refuse(self, status: int, reason: str) -> None:
        self._send(Answer(status, {"error": reason}))

    def _send(self, answer: Answer) -> None:
        raw = isinstance(answer.body, bytes)
        data = answer.body if raw else msgspec.json.encode(answer.body)
        if self.command == "POST" and not self._read:
            self.close_connection = (
                True  # what is left of the request would be taken for the next one
            )
        self._read = False
        self.send_response(answer.status)
        self.send_header("Content-Type", MSGPACK if raw else "application/json")
        self.send_header("Content-Length", str(len(data)))
        if answer.status in _AGAIN:
            self.send_header("Retry-After", str(RETRY_AFTER))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)


class _BadRequestError(Exception):
    """The request is wrong."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _number(text: str | None, name: str) -> int:
    if text is None or not text.isdecimal() or len(text) > 18:
        raise _BadRequestError(400, f"{name} is {text!r}; it must be a whole number, 0 or more")
    return int(text)
