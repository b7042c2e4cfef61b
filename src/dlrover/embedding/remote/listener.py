"""Connections to an embedding server, one thread for each, and the requests that it answers on them."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from dlrover._util import sockets
from dlrover.checkpoint.storage.stores import StorageAwayError, open_store
from dlrover.embedding.remote import arrays, stored, wire
from dlrover.embedding.remote.directory import Directory
from dlrover.embedding.remote.holding import HeldSlots, OutdatedPlacementError
from dlrover.embedding.remote.wire import Op, ReplyStatus, RowFrame
from dlrover.errors import DLRoverError, NoRoomError, ProtocolError
from dlrover.spec.requests.placement import SLOTS

if TYPE_CHECKING:
    from dlrover.embedding.remote.server import EmbeddingServer

logger = logging.getLogger(__name__)


_STATUS: dict[type[DLRoverError], ReplyStatus] = {
    StorageAwayError: ReplyStatus.AWAY,
    NoRoomError: ReplyStatus.FULL,
    OutdatedPlacementError: ReplyStatus.MOVED,
}
"""What a reply says of errors; of all others, that the request was refused."""


class Answering(Protocol):
    """The server's end of one connection."""

    def answer(self) -> None:
        """Receive one request and answer it."""


class RowListener:
    """Listens at an address once made, and answers once started.

    Args:
        address: Address to listen on.
        answering: Returns what answers on a connection.
        port: Port to listen on; 0 for any free one.
    """

    def __init__(
        self, address: str, answering: Callable[[socket.socket], Answering], port: int = 0
    ) -> None:
        self._answering = answering
        self._secret = b""
        self._ended = threading.Event()
        self._open: set[socket.socket] = set()
        self._sock = socket.create_server((address, port), backlog=1024)
        self.port: int = self._sock.getsockname()[1]

    def start(self, secret: bytes) -> None:
        """Answer whoever knows the secret."""
        self._secret = secret
        accept = threading.Thread(
            target=sockets.serve_each,
            args=(self._sock, self._serve, "serve"),
            name="accept",
            daemon=True,
        )
        accept.start()

    def close(self) -> None:
        """Close all connections."""
        self._ended.set()
        sockets.end(self._sock)
        for sock in tuple(self._open):
            sockets.shut_down(sock)

    def _serve(self, sock: socket.socket) -> None:
        self._open.add(sock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.accept(sock, self._secret)
            connection = self._answering(sock)
            while not self._ended.is_set():
                connection.answer()
        except ProtocolError as error:
            logger.warning("Closed a connection: %s", error)
        except OSError as error:
            logger.debug("A connection has ended: %s", error)
        finally:
            self._open.discard(sock)
            sock.close()


class ServerConnection:
    """A connection to a server of a job."""

    def __init__(
        self,
        sock: socket.socket,
        holding: HeldSlots,
        directory: Directory,
        server: EmbeddingServer,
    ) -> None:
        self._sock, self._holding = sock, holding
        self._directory, self._server = directory, server
        self._receiver = wire.FrameReceiver(sock)
        self._copied: arrays.Arrays | None = None
        self._rows = 0
        self._answers: dict[Op, Callable[[RowFrame], None]] = {
            Op.LOOKUP: self._rows_of,
            Op.PEEK: self._rows_of,
            Op.PUSH: self._push,
            Op.FETCH: self._fetch,
            Op.EXPORT: self._export,
            Op.WRITE: self._write,
            Op.LOAD: self._load,
            Op.STATS: self._stats,
            Op.EVICT: self._evict,
        }

    def answer(self) -> None:
        """Receive one request and answer it."""
        request = self._receiver.receive()
        try:
            if request.op is not Op.FETCH:  # those who replace this server get its rows
                self._server.check_lease()
            if not self._holding.knows(request.table):
                self._holding.open_tables(self._directory.look(-1))
            self._answers[request.op](request)
        except DLRoverError as error:
            known = (kind for kind in _STATUS if isinstance(error, kind))
            status = _STATUS.get(next(known, DLRoverError), ReplyStatus.REFUSED)
            wire.send(self._sock, RowFrame(request.op, status), str(error).encode())
        except MemoryError:  # a client that lost its connection would ask again and again
            reason = b"The embedding server has too little memory for the request."
            wire.send(self._sock, RowFrame(request.op, ReplyStatus.FULL), reason)

    def _reply(self, request: RowFrame, body: bytes = b"") -> None:
        wire.send(self._sock, RowFrame(request.op), body)

    # ---- keys

    def _rows_of(self, request: RowFrame) -> None:
        body = np.asarray(request.body)
        if body.nbytes != 8 * request.keys:
            raise ProtocolError(f"A lookup of {request.keys} keys has {body.nbytes} bytes.")
        insert = request.op is Op.LOOKUP
        rows = self._holding.rows(request.table, body.view(np.int64), insert=insert)
        self._server.check_lease()  # again: this process may have been stopped meanwhile
        if rows is None:
            wire.send(self._sock, RowFrame(request.op, ReplyStatus.MOVED))
        else:
            wire.send(self._sock, RowFrame(request.op, keys=request.keys), rows.reshape(-1))

    def _push(self, request: RowFrame) -> None:
        count, dim = request.keys, self._holding.table(request.table).dim
        body = np.asarray(request.body)
        if body.nbytes != count * (8 + 4 * dim):
            raise ProtocolError(
                f"A push of {count} keys with {dim} values each has {body.nbytes} bytes."
            )
        keys = body[: 8 * count].view(np.int64)
        gradients = body[8 * count :].view(np.float32).reshape(count, dim)
        applied = self._holding.push(
            request.table, request.client, request.sequence, keys, gradients
        )
        self._server.check_lease()
        wire.send(
            self._sock, RowFrame(request.op, ReplyStatus.OK if applied else ReplyStatus.MOVED)
        )

    # ---- slots as a whole

    def _fetch(self, request: RowFrame) -> None:
        body = np.asarray(request.body)
        if body.nbytes != 2 * request.keys:
            raise ProtocolError(f"A request for {request.keys} slots has {body.nbytes} bytes.")
        slots = body.view(np.uint16).astype(np.intp)
        if len(slots) and slots.max() >= SLOTS:
            raise ProtocolError(f"Slot {slots.max()} was asked for; there are {SLOTS}.")
        version = self._server.check_gift(slots)
        self._holding.give(slots.tolist(), version)
        for some in self._holding.portions(slots):
            found = self._holding.export(some)
            wire.send(self._sock, RowFrame(request.op, keys=len(some)), *arrays.packed(found))

    def _export(self, request: RowFrame) -> None:
        order = wire.decoded(bytes(request.body), wire.Export)
        self._server.catch_up(order.version)
        try:
            self._copied, self._rows = self._holding.export_changes(order.id, order.parent)
        except OutdatedPlacementError:
            raise
        except ProtocolError as error:
            self._reply(request, msgspec.json.encode(wire.Exported(refused=str(error))))
            return
        slots = tuple(int(slot) for slot in self._copied["slots"])
        self._reply(request, msgspec.json.encode(wire.Exported(slots, self._rows)))

    def _write(self, request: RowFrame) -> None:
        order = wire.decoded(bytes(request.body), wire.Write)
        if self._copied is None:
            raise ProtocolError("An embedding server has no copy to write.")
        store = open_store(order.place)
        part = stored.write_part(store, order.id, order.server, self._copied, self._rows)
        self._copied = None
        self._reply(request, msgspec.json.encode(part))

    def _load(self, request: RowFrame) -> None:
        order = wire.decoded(bytes(request.body), wire.Load)
        self._server.catch_up(order.version)
        store = open_store(order.place)
        manifest = stored.read_manifest(store, order.id)
        parts = (found for _, found in stored.parts(store, manifest))
        self._holding.load(order.attempt, manifest, parts)
        self._reply(request)

    def _stats(self, request: RowFrame) -> None:
        self._reply(request, msgspec.json.encode(self._holding.rows_held()))

    def _evict(self, request: RowFrame) -> None:
        self._reply(request, msgspec.json.encode(self._holding.evict()))
