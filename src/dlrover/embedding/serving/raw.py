"""The raw protocol of read-only servers: frames of `dlrover.embedding.remote.wire`, and a client."""

from __future__ import annotations

import hmac
import socket
import threading
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlrover._util import decoding
from dlrover.embedding.remote import wire
from dlrover.embedding.remote.wire import Op, ReplyStatus, RowFrame
from dlrover.embedding.serving.follower import CheckpointFollower, Lag
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError

CONNECT_TIMEOUT = 10.0
REPLY_TIMEOUT = 60.0
CHUNK_KEYS = 1 << 18
"""Keys of one request; larger batches are sent in several."""


class TableInfo(msgspec.Struct, frozen=True):
    """A table that is served."""

    dim: int
    rows: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """State of a read-only server."""

    lag: Lag
    tables: dict[str, TableInfo]
    """By name. The raw protocol numbers them in this order, from 0."""


def report(follower: CheckpointFollower) -> Report:
    """Return the state of a server."""
    tables = follower.served.tables
    return Report(
        lag=follower.lag(),
        tables={name: TableInfo(each.dim, len(each)) for name, each in tables.items()},
    )


def secret_of(token: str) -> bytes:
    """Return the secret of connections, which follows from the server's token."""
    return hmac.digest(token.encode(), b"embedding", "sha256")


class ReaderConnection:
    """One client's connection to a read-only server."""

    def __init__(self, sock: socket.socket, follower: CheckpointFollower) -> None:
        self._sock, self._follower = sock, follower
        self._receiver = wire.FrameReceiver(sock)

    def answer(self) -> None:
        """Receive one request and answer it."""
        request = self._receiver.receive()
        match request.op:
            case Op.LOOKUP | Op.PEEK:
                self._rows(request)
            case Op.STATS:
                body = msgspec.json.encode(report(self._follower))
                wire.send(self._sock, RowFrame(request.op), body)
            case _:
                self._refuse(request, "This embedding server is read-only.")

    def _rows(self, request: RowFrame) -> None:
        body, tables = np.asarray(request.body), list(self._follower.served.tables.values())
        if body.nbytes != 8 * request.keys:
            self._refuse(request, f"A lookup of {request.keys} keys has {body.nbytes} bytes.")
        elif request.table >= len(tables):
            self._refuse(request, f"The embedding server knows no table {request.table}.")
        else:
            rows = tables[request.table].peek(body.view(np.int64))
            wire.send(self._sock, RowFrame(request.op, keys=request.keys), rows.reshape(-1))

    def _refuse(self, request: RowFrame, reason: str) -> None:
        wire.send(self._sock, RowFrame(request.op, ReplyStatus.REFUSED), reason.encode())


class ServedTables:
    """Client of ``dlrover embedding serve``. One thread uses it at a time; others wait.

    Args:
        address: ``HOST:PORT`` of the raw protocol.
        token: The server's token.

    Raises:
        InfrastructureError: The server does not answer, or has another token.
    """

    def __init__(self, address: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdecimal():
            raise ConfigurationError(f"address is {address!r}; HOST:PORT is accepted.")
        self._address = address
        self._lock = threading.Lock()
        try:
            self._sock = wire.connect(host, int(port), secret_of(token), CONNECT_TIMEOUT)
        except OSError as error:
            raise InfrastructureError(
                f"{address} does not answer, or has another token: {error}."
            ) from error
        self._sock.settimeout(REPLY_TIMEOUT)
        self._receiver = wire.FrameReceiver(self._sock)
        self._tables: dict[str, tuple[int, int]] = {}

    def report(self) -> Report:
        """Return the server's lag and its tables."""
        with self._lock:
            return self._report()

    def peek(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows of keys, ``(n, dim)``; missing ones are zeros.

        Raises:
            ConfigurationError: There is no such table.
            InfrastructureError: The server does not answer.
        """
        with self._lock:
            if table not in self._tables:
                self._report()
            if table not in self._tables:
                raise ConfigurationError(
                    f"table is {table!r}; accepted are {', '.join(self._tables)}."
                )
            number, dim = self._tables[table]
            out = np.empty((len(keys), dim), np.float32)
            for first in range(0, len(keys), CHUNK_KEYS):
                some = np.ascontiguousarray(keys[first : first + CHUNK_KEYS], np.int64)
                reply = self._ask(RowFrame(Op.PEEK, table=number, keys=len(some)), some)
                rows = np.asarray(reply.body).view(np.float32).reshape(len(some), dim)
                out[first : first + len(some)] = rows
            return out

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _report(self) -> Report:
        reply = self._ask(RowFrame(Op.STATS))
        found = decoding.json(bytes(reply.body), Report)
        self._tables = {
            name: (number, info.dim) for number, (name, info) in enumerate(found.tables.items())
        }
        return found

    def _ask(self, frame: RowFrame, *parts: NDArray[Any]) -> RowFrame:
        try:
            wire.send(self._sock, frame, *parts)
            reply = self._receiver.receive()
        except OSError as error:
            raise InfrastructureError(f"{self._address} does not answer: {error}.") from error
        if reply.status is not ReplyStatus.OK:
            raise ProtocolError(bytes(reply.body).decode(errors="replace"))
        return reply
