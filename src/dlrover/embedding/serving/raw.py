"""The raw protocol of read-only servers: frames of `dlrover.embedding.remote.wire`, and a client."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlrover._util import decoding
from dlrover.embedding.remote import wire
from dlrover.embedding.remote.client import CHUNK_BYTES, CHUNK_KEYS
from dlrover.embedding.remote.wire import Op, ReplyStatus, RowFrame
from dlrover.embedding.serving.follower import CheckpointFollower, Lag
from dlrover.embedding.table import as_words, like
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError

CONNECT_TIMEOUT = 10.0
REPLY_TIMEOUT = 60.0
T = TypeVar("T")


class TableInfo(msgspec.Struct, frozen=True):
    """A table that is served."""

    number: int
    """What the raw protocol knows it by, for as long as the server runs."""
    dim: int
    rows: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """State of a read-only server."""

    lag: Lag
    tables: dict[str, TableInfo]
    """By name."""


def report(follower: CheckpointFollower) -> Report:
    """Return the state of a server."""
    tables = follower.served.tables
    return Report(
        lag=follower.lag(),
        tables={
            name: TableInfo(follower.names.index(name), each.dim, len(each))
            for name, each in tables.items()
        },
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
        body, names = np.asarray(request.body), self._follower.names
        name = names[request.table] if request.table < len(names) else ""
        table = self._follower.served.tables.get(name)
        if body.nbytes != 8 * request.keys:
            self._refuse(request, f"A lookup of {request.keys} keys has {body.nbytes} bytes.")
        elif table is None:
            self._refuse(request, f"The embedding server has no table {name or request.table}.")
        else:
            rows = table.peek(body.view(np.int64))
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
        self._host, _, self._port = address.rpartition(":")
        if not self._port.isdecimal():
            raise ConfigurationError(f"address is {address!r}; HOST:PORT is accepted.")
        self._address, self._token = address, token
        self._lock = threading.Lock()
        self._tables: dict[str, tuple[int, int]] = {}
        self._sock: socket.socket | None = None
        self._receiver: wire.FrameReceiver | None = None
        self._connect()

    def _connect(self) -> None:
        """Connect if there is no connection without a request that waits for its reply."""
        if self._receiver is not None:
            return
        if self._sock is not None:
            self._sock.close()
        try:
            self._sock = wire.connect(
                self._host, int(self._port), secret_of(self._token), CONNECT_TIMEOUT
            )
        except OSError as error:
            raise InfrastructureError(
                f"{self._address} does not answer, or has another token: {error}."
            ) from error
        self._sock.settimeout(REPLY_TIMEOUT)
        self._tables = {}  # another server may number them otherwise
        self._receiver = wire.FrameReceiver(self._sock)

    def report(self) -> Report:
        """Return the server's lag and its tables."""
        return self._twice(self._report)

    def peek(self, table: str, keys: Any) -> Any:
        """Return rows of keys, ``(n, dim)``; missing ones are zeros. Keys and results are those of `HashTable.peek`.

        Raises:
            ConfigurationError: There is no such table.
            InfrastructureError: The server does not answer.
        """
        words = as_words(keys).view(np.int64)
        return like(self._twice(lambda: self._rows(table, words)), keys)

    def _rows(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        self._connect()
        if table not in self._tables:
            self._report()
        if table not in self._tables:
            raise ConfigurationError(f"table is {table!r}; accepted are {', '.join(self._tables)}.")
        number, dim = self._tables[table]
        most = min(CHUNK_KEYS, CHUNK_BYTES // (4 * dim))
        out = np.empty((len(keys), dim), np.float32)
        for first in range(0, len(keys), most):
            some = keys[first : first + most]
            reply = self._ask(RowFrame(Op.PEEK, table=number, keys=len(some)), some)
            rows = np.asarray(reply.body)
            if rows.nbytes != 4 * dim * len(some):
                self._tables = {}
                raise _AskAnewError(f"{self._address} has rows of another dimension now.")
            out[first : first + len(some)] = rows.view(np.float32).reshape(len(some), dim)
        return out

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._receiver = None
        if self._sock is not None:
            self._sock.close()

    def _report(self) -> Report:
        self._connect()
        reply = self._ask(RowFrame(Op.STATS))
        found = decoding.json(bytes(reply.body), Report)
        self._tables = {name: (info.number, info.dim) for name, info in found.tables.items()}
        return found

    def _twice(self, ask: Callable[[], T]) -> T:
        """Ask, and once more if the connection was closed, or the server has another table now."""
        with self._lock:
            try:
                return ask()
            except _AskAnewError:
                return ask()

    def _ask(self, frame: RowFrame, *parts: NDArray[Any]) -> RowFrame:
        receiver = self._receiver
        assert receiver is not None
        self._receiver = None  # until the reply is here: no other request may take it for its own
        assert self._sock is not None
        try:
            wire.send(self._sock, frame, *parts)
            reply = receiver.receive()
        except OSError as error:
            kind = _AskAnewError if isinstance(error, ConnectionError) else InfrastructureError
            raise kind(f"{self._address} does not answer: {error}.") from error
        self._receiver = receiver
        if reply.status is not ReplyStatus.OK:
            raise ProtocolError(bytes(reply.body).decode(errors="replace"))
        return reply


class _AskAnewError(InfrastructureError):
    """Raised when the server has closed the connection, or has rows of another dimension."""
