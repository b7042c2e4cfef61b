"""HTTP of read-only servers: ``GET /status`` and ``POST /lookup``, with JSON bodies."""

from __future__ import annotations

import hmac
import logging
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import msgspec
import numpy as np

from dlrover._util import decoding
from dlrover.embedding.serving import raw
from dlrover.embedding.serving.follower import CheckpointFollower

logger = logging.getLogger(__name__)

MAX_BODY = 1 << 25
"""Maximum bytes of a request's body."""
MAX_KEYS = 1 << 20
MAX_UNREAD = 1 << 16
"""Maximum bytes of a body that is read although the request is refused."""
TIMEOUT = 60.0
"""Seconds that a client may take to send a request."""


class LookupRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /lookup``."""

    keys: list[int | str]
    """Numbers of int64, or texts for tables whose keys are texts; not both."""
    table: str = ""
    """Name of the table; it may be left out if there is one only."""


_request = decoding.json_decoder(LookupRequest)


class LookupReply(msgspec.Struct, frozen=True):
    """Answer to ``POST /lookup``."""

    step: int
    table: str
    rows: list[list[float]]
    """A row for each key; zeros for a key without one."""


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HttpServer(ThreadingHTTPServer):
    """Answers whoever has the token, in a thread for each connection, once `serve_forever` runs.

    Args:
        address: Host and port; 0 for any free port.
        follower: What is served.
        token: Text that each request gives as ``Authorization: Bearer TOKEN``.
    """

    daemon_threads = True
    request_queue_size = 1024  # of the class; its own 5 are soon too few

    def __init__(self, address: tuple[str, int], follower: CheckpointFollower, token: str) -> None:
        self.follower, self.token = follower, token
        super().__init__(address, _LookupHandler)


class _LookupHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(TIMEOUT)

    def do_GET(self) -> None:
        self._answer({"/status": self._status})

    def do_POST(self) -> None:
        self._answer({"/lookup": self._lookup})

    def _answer(self, paths: dict[str, Any]) -> None:
        try:
            self._check_token()
            body = self._body()
            status, reply = HTTPStatus.OK, paths.get(self.path, self._nothing)(body)
        except _RefusedError as error:
            status, reply = error.status, {"error": str(error)}
        data = msgspec.json.encode(reply)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _length(self) -> int:
        length = self.headers.get("Content-Length", "0")
        known = length.isdecimal() and len(length) < 20 and "Transfer-Encoding" not in self.headers
        return int(length) if known else MAX_BODY + 1

    def _body(self) -> bytes:
        length = self._length()
        if length > MAX_BODY:
            self.close_connection = True
            raise _RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"Content-Length is {self.headers.get('Content-Length')}; a number up to {MAX_BODY} is accepted.",
            )
        return self.rfile.read(length)

    def _check_token(self) -> None:
        given = self.headers.get("Authorization", "").encode("latin-1")  # as it came
        if not hmac.compare_digest(given, f"Bearer {self._server.token}".encode()):
            self.close_connection = True
            if self._length() <= MAX_UNREAD:
                self.rfile.read(self._length())  # a client that still sends would not see the reply
            raise _RefusedError(
                HTTPStatus.UNAUTHORIZED, "Authorization is not Bearer with this server's token."
            )

    @property
    def _server(self) -> HttpServer:
        return cast("HttpServer", self.server)

    def _nothing(self, _body: bytes) -> None:
        raise _RefusedError(HTTPStatus.NOT_FOUND, f"There is no {self.command} {self.path}.")

    def _status(self, _body: bytes) -> raw.Report:
        return raw.report(self._server.follower)

    def _lookup(self, body: bytes) -> LookupReply:
        served = self._server.follower.served
        try:
            request = _request.decode(body)
        except msgspec.DecodeError as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"The body is wrong: {error}.") from error
        name = request.table or (next(iter(served.tables)) if len(served.tables) == 1 else "")
        if name not in served.tables:
            raise _RefusedError(
                HTTPStatus.NOT_FOUND,
                f"table is {request.table!r}; accepted are {', '.join(served.tables)}.",
            )
        if len(request.keys) > MAX_KEYS:
            raise _RefusedError(
                HTTPStatus.BAD_REQUEST,
                f"There are {len(request.keys)} keys; at most {MAX_KEYS} are accepted.",
            )
        rows = served.tables[name].peek(_keys(request.keys))
        return LookupReply(served.step, name, rows.tolist())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        logger.debug(format, *args)


def _keys(given: list[int | str]) -> Any:
    texts = [key for key in given if isinstance(key, str)]
    if texts and len(texts) == len(given):
        return texts
    try:
        if not texts:
            return np.array(given, np.int64)
    except OverflowError:
        pass
    raise _RefusedError(
        HTTPStatus.BAD_REQUEST, "keys are wrong; numbers of int64 or texts are accepted."
    )
