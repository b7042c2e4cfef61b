"""Frames between embedding servers and their clients, on a plain TCP connection, and the orders that some contain.

A frame is a header of 48 bytes and a body: arrays in the machine's byte order, which both ends check at the
start. Each end proves that it knows the job's secret before the other reads anything else from it.
"""

from __future__ import annotations

import enum
import socket
import struct
import sys
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlrover._util import decoding, framing, handshake, sockets
from dlrover.errors import InfrastructureError, ProtocolError

Bytes: TypeAlias = NDArray[np.uint8]

_HEADER = struct.Struct("<4sBBHIIQQQII")
_MAGIC = b"DLE\x01" if sys.byteorder == "little" else b"DLE\x02"
MAX_BODY = 1 << 30
"""Maximum bytes of a frame's body."""
MAX_KEYS = 1 << 22
"""Maximum keys of a frame."""
PART_BITS = 16
"""Lowest bits of the number of a push, which count the parts of one update; the others are those of the update."""


class Op(enum.IntEnum):
    """What a request asks for."""

    LOOKUP = 1
    PEEK = 2
    PUSH = 3
    FETCH = 4
    EXPORT = 5
    """Copy what changed, to be written by the next WRITE on this connection."""
    WRITE = 6
    LOAD = 7
    STATS = 8
    EVICT = 9


class ReplyStatus(enum.IntEnum):
    """Outcome of a request; zero in requests."""

    OK = 0
    MOVED = 1
    """Some keys do not belong to this server now: look at the placement and ask again."""
    REFUSED = 2
    """Asking again would not help; the body says why."""
    AWAY = 3
    """A store cannot be read or written now; the body says why."""
    FULL = 4
    """Rows exceed the limits of a table; the body says which."""


class RowFrame(NamedTuple):
    """A request or a reply."""

    op: Op
    status: ReplyStatus = ReplyStatus.OK
    table: int = 0
    """Number of the table: its place in the placement."""
    keys: int = 0
    """Number of keys in the body."""
    client: int = 0
    sequence: int = 0
    """Number of a push of its client; a repeated push has the number of the first."""
    body: Bytes | bytes = b""


def send(sock: socket.socket, frame: RowFrame, *parts: NDArray[np.generic] | bytes) -> None:
    """Send a frame whose body is ``parts``, without copying them."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    size = sum(view.nbytes for view in views)
    header = _HEADER.pack(
        _MAGIC, frame.op, frame.status, 0, frame.table, frame.keys, frame.client, frame.sequence, size, 0, 0
    )  # fmt: skip
    sockets.send_all(sock, [memoryview(header), *views])


class FrameReceiver:
    """Receives frames of a connection; the body of a frame is valid until the next one is received."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._header = bytearray(_HEADER.size)
        self._body: Bytes = np.empty(1 << 16, np.uint8)

    def receive(self) -> RowFrame:
        """Return the next frame.

        Raises:
            ConnectionError: The peer has closed the connection.
            ProtocolError: The bytes are no frame.
        """
        framing.fill(memoryview(self._header), self._sock.recv_into)
        magic, op, status, _, table, count, client, sequence, size, _, _ = _HEADER.unpack(
            self._header
        )
        if magic != _MAGIC:
            raise ProtocolError(f"An embedding frame begins with {magic!r}, not {_MAGIC!r}.")
        if size > MAX_BODY or count > MAX_KEYS:
            raise ProtocolError(
                f"An embedding frame has {size} bytes and {count} keys; {MAX_BODY} and {MAX_KEYS} are accepted."
            )
        try:
            named = Op(op), ReplyStatus(status)
        except ValueError as error:
            raise ProtocolError(
                f"An embedding frame has operation {op} and status {status}."
            ) from error
        if size > self._body.nbytes:
            self._body = np.empty(size, np.uint8)
        body = self._body[:size]
        framing.fill(memoryview(body), self._sock.recv_into)
        return RowFrame(*named, table, count, client, sequence, body)


def accept(sock: socket.socket, secret: bytes) -> None:
    """Check that the client knows the secret, and prove the same to it.

    Raises:
        ProtocolError: The client does not.
    """
    if not handshake.accept(sock, secret):
        raise ProtocolError("A client of the embedding server does not know the job's secret.")


def connect(address: str, port: int, secret: bytes, timeout: float) -> socket.socket:
    """Return a connection to a server that knows the secret.

    Raises:
        OSError: There is no connection within ``timeout`` seconds.
        InfrastructureError: Another program answers at the address.
    """
    sock = socket.create_connection((address, port), timeout)
    if not handshake.offer(sock, secret):
        raise InfrastructureError(f"{address}:{port} is no embedding server of this job.")
    return sock


# ---- orders about checkpoints, and their replies: the bodies of frames, as JSON


class Export(msgspec.Struct, frozen=True):
    """Copy the rows of the server's slots: all, or those changed since the copy for ``parent``."""

    id: str
    """Checkpoint that the copy is for."""
    parent: str
    """Checkpoint that it adds to; empty: copy all rows."""
    version: int
    """Placement that the server must know."""


class Exported(msgspec.Struct, frozen=True):
    """What was copied."""

    slots: tuple[int, ...] = ()
    rows: int = 0
    refused: str = ""
    """Why nothing was copied: the last copy, or what was restored since, is not ``parent``."""


class Write(msgspec.Struct, frozen=True):
    """Write the copy to a store."""

    place: str
    id: str
    server: int


class Load(msgspec.Struct, frozen=True):
    """Replace all rows by those of a checkpoint."""

    attempt: str
    """The attempt that the order belongs to; a server obeys the latest one only."""
    place: str
    id: str
    version: int
    """Placement that the server must know."""


class RowsHeld(msgspec.Struct, frozen=True):
    """What a server answers for."""

    slots: tuple[int, ...]
    rows: dict[str, int]
    """Rows by table."""


Order = TypeVar("Order")


def decoded(body: bytes, kind: type[Order]) -> Order:
    """Return an order or a reply.

    Raises:
        ProtocolError: The bytes are none.
    """
    try:
        return decoding.json(body, kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"An order to an embedding server cannot be read: {error}.") from error
