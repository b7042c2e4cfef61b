"""Client of the embedding servers: a table whose rows lie on several of them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlrover._native.tables import slots_of
from dlrover._util import backoff, forks
from dlrover.embedding.remote import wire
from dlrover.embedding.remote.directory import JOURNAL_LOST, Directory, half_loaded
from dlrover.embedding.remote.holding import Keys, Rows, Slots
from dlrover.embedding.remote.wire import Op, ReplyStatus, RowFrame
from dlrover.errors import ConfigurationError, InfrastructureError, NoRoomError, ProtocolError
from dlrover.spec.requests.placement import SLOTS, OpenTable, PlacedServer, PlacementReply

logger = logging.getLogger(__name__)

TIMEOUT = 600.0
"""Seconds that a request waits for a server that starts, recovers or moves."""
CONNECT_TIMEOUT = 5.0
REPLY_TIMEOUT = 60.0
"""Seconds without a byte after which a server counts as lost, and the request is repeated."""
RETRY = 0.005, 0.2
"""Seconds until the first look for a server that is not ready, and between later ones."""
WARN_AFTER = 10.0
ALL_SLOTS = [*range(SLOTS)]
CHUNK_KEYS = 1 << 18
CHUNK_BYTES = 1 << 28
"""Keys of one request, and bytes of their rows, at most; larger batches are sent in several."""

Message: TypeAlias = tuple[RowFrame, tuple[NDArray[np.generic], ...]]


class ServerGroup:
    """Connections of this process to the servers. One thread uses it at a time; others wait.

    Args:
        directory: Source of the placement.
        timeout: Seconds that a request waits for a server at most.
    """

    def __init__(self, directory: Directory, timeout: float = TIMEOUT) -> None:
        self._directory, self._timeout = directory, timeout
        self._client, self._pid = secrets.randbits(63), os.getpid()
        self._update = 0
        self._lock = forks.Lock()
        self._closed = threading.Event()
        self._placement = PlacementReply()
        self._owners = np.empty(0, np.intp)
        self._links: dict[int, _Link] = {}

    def open(self, name: str, options: str) -> int:
        """Open a table; return its number.

        Raises:
            ConfigurationError: It is open with other options.
        """
        with self._lock:
            self._use(self._directory.ask(OpenTable(name, options)))
            return list(self._placement.tables).index(name)

    def rows(self, table: int, dim: int, keys: Keys, *, insert: bool) -> Rows:
        """Return rows of keys, ``(n, dim)``."""
        found = np.empty((len(keys), dim), np.float32)
        op = Op.LOOKUP if insert else Op.PEEK

        def message(places: Slots) -> Message:
            return RowFrame(op, table=table, keys=len(places)), (keys[places],)

        def take(places: Slots, reply: RowFrame) -> None:
            body = np.asarray(reply.body)
            if body.nbytes != 4 * dim * len(places):
                raise ProtocolError(f"{len(places)} rows of {dim} values have {body.nbytes} bytes.")
            found[places] = body.view(np.float32).reshape(len(places), dim)

        with self._lock:
            for chunk in _chunks(len(keys), dim):
                self._exchange(keys, chunk, message, take)
        return found

    def push(self, table: int, keys: Keys, gradients: Rows) -> None:
        """Apply gradients ``(n, dim)``, each once, whatever is sent again."""
        chunks = _chunks(len(keys), gradients.shape[1])
        if len(chunks) > 1:  # equal keys, which count once, must not come in two of them
            keys, gradients = _summed(keys, gradients)
            chunks = _chunks(len(keys), gradients.shape[1])
        with self._lock:
            self._update += 1
            for number, chunk in enumerate(chunks):
                sequence = (self._update << wire.PART_BITS) + number
                frame = RowFrame(Op.PUSH, table=table, client=self._client, sequence=sequence)

                def message(places: Slots, frame: RowFrame = frame) -> Message:
                    return frame._replace(keys=len(places)), (
                        keys[places],
                        gradients[places].reshape(-1),
                    )

                self._exchange(keys, chunk, message, lambda _places, _reply: None)

    def count_rows(self, name: str) -> int:
        """Return the number of rows of a table, each counted at the server that answers for it."""
        with self._lock:
            for _ in self._attempts(lambda: "Waiting for each row to be at one embedding server"):
                replies = [self._order(index, Op.STATS) for index in self._servers()]
                held = [
                    wire.decoded(reply, wire.RowsHeld) for reply in replies if reply is not None
                ]
                if sorted(slot for each in held for slot in each.slots) == ALL_SLOTS:
                    return sum(each.rows.get(name, 0) for each in held)
        raise AssertionError

    def evict(self) -> int:
        """Remove what has expired; return how many rows servers report, without those of a lost reply."""
        removed: dict[int, int] = {}
        with self._lock:
            self._use(self._directory.look(-1))
            for _ in self._attempts(lambda: "Waiting for an embedding server to remove rows"):
                for index in [index for index in self._servers() if index not in removed]:
                    reply = self._order(index, Op.EVICT)
                    if reply is not None:
                        removed[index] = wire.decoded(reply, int)
                if self._owners.size and removed.keys() >= set(self._servers()):
                    return sum(removed.values())
        raise AssertionError

    def _servers(self) -> list[int]:
        return sorted(set(self._placement.owners))

    def _order(self, index: int, op: Op) -> bytes | None:
        """Return a server's reply to an order without keys; None if there is none."""
        link = self._link(index)
        if link is None or not link.send(RowFrame(op), ()):
            return None
        reply = link.receive()
        if reply is None or reply.status is ReplyStatus.MOVED:
            return None
        if reply.status is not ReplyStatus.OK:
            raise ConfigurationError(bytes(reply.body).decode(errors="replace"))
        return bytes(reply.body)

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        with self._lock:
            for link in self._links.values():
                link.close()
            self._links.clear()

    def _begin_anew(self) -> None:
        """Become another client with connections of its own: this process is a fork of the first one."""
        self._client, self._pid = secrets.randbits(63), os.getpid()
        for link in self._links.values():
            link.close()
        self._links.clear()

    # ---- one batch

    def _exchange(
        self,
        keys: Keys,
        places: Slots,
        message: Callable[[Slots], Message],
        take: Callable[[Slots, RowFrame], None],
    ) -> None:
        """Ask the owners of ``keys[places]``; ask again those that do not answer or own the keys no more."""
        slots = slots_of(keys[places])
        for _ in self._attempts(lambda: self._waiting(slots)):  # noqa: B023 - those that are left then
            if len(self._owners):
                left = self._attempt(places, slots, message, take)
                places, slots = places[left], slots[left]
            if not len(places):
                return

    def _attempts(self, waiting: Callable[[], str]) -> Iterator[None]:
        """Yield until the caller is content, each time with the placement that is known then.

        Raises:
            InfrastructureError: This has taken too long; ``waiting`` says what for.
        """
        if self._pid != os.getpid():
            self._begin_anew()
        began = time.monotonic()
        warn_at = began + WARN_AFTER
        delays = backoff.delays(*RETRY)
        while True:
            yield
            if self._closed.is_set():
                raise InfrastructureError("The client of the embedding servers is closed.")
            waited = time.monotonic() - began
            if waited > self._timeout:
                raise InfrastructureError(
                    f"{waiting()}; waited {waited:.0f} s of {self._timeout:.0f} s."
                )
            if time.monotonic() > warn_at:
                warn_at = float("inf")
                logger.warning("%s: %.0f s of %.0f s", waiting(), waited, self._timeout)
            reply = self._directory.look(self._placement.version)
            if reply.version == self._placement.version:
                self._closed.wait(next(delays))
            else:
                self._use(reply)
            loading = self._placement.loading
            if loading is not None and loading.phase == "failed":
                raise InfrastructureError(half_loaded(loading))

    def _attempt(
        self,
        places: Slots,
        slots: Slots,
        message: Callable[[Slots], Message],
        take: Callable[[Slots, RowFrame], None],
    ) -> NDArray[np.bool_]:
        """Send to each owner, then receive from each; return which places have no answer."""
        owners = self._owners[slots]
        order = np.argsort(owners, kind="stable")
        bounds = np.flatnonzero(np.diff(owners[order], prepend=-1))
        left = np.ones(len(places), np.bool_)
        asked: list[tuple[_Link, Slots]] = []
        for part in np.split(order, bounds[1:]):
            link = self._link(int(owners[part[0]]))
            if link is not None and link.send(*message(places[part])):
                asked.append((link, part))
        refused: dict[ReplyStatus, str] = {}
        for link, part in asked:  # all of them, so that no reply is left for the next request
            reply = link.receive()
            if reply is None or reply.status is ReplyStatus.MOVED:
                continue
            if reply.status is ReplyStatus.OK:
                take(places[part], reply)
                left[part] = False
            else:
                refused[reply.status] = bytes(reply.body).decode(errors="replace")
        for status, reason in refused.items():
            raise NoRoomError(reason) if status is ReplyStatus.FULL else ConfigurationError(reason)
        return left

    def _waiting(self, slots: Slots) -> str:
        loading = self._placement.loading
        if loading is not None:
            return f"Waiting for the load of step {loading.step} of the embedding tables"
        if not len(self._owners):
            return "Waiting for the embedding servers to start"
        index = int(self._owners[slots[0]])
        server = self._placement.servers[index]
        state = "answer" if server.ready else "have its rows again"
        return f"Waiting for embedding server {index} ({server.address}:{server.port}) to {state}"

    # ---- servers

    def _use(self, placement: PlacementReply) -> None:
        known = [*self._placement.tables]
        if [*placement.tables][: len(known)] != known:
            raise InfrastructureError(JOURNAL_LOST)
        self._placement = placement
        self._owners = np.array(placement.owners, np.intp)
        for index, link in list(self._links.items()):
            if (
                placement.servers.get(index) is None
                or placement.servers[index].start != link.server.start
            ):
                link.close()
                del self._links[index]

    def _link(self, index: int) -> _Link | None:
        """Return the connection to a server; None if it cannot be reached or has not its rows yet."""
        link = self._links.get(index)
        server = self._placement.servers[index]
        if link is not None and link.waiting:  # whoever asked was interrupted
            link.close()
        if link is not None and link.sock is not None:
            return link
        if not server.ready:
            return None
        try:
            sock = wire.connect(
                server.address, server.port, self._placement.secret, CONNECT_TIMEOUT
            )
        except (OSError, InfrastructureError) as error:
            logger.debug("Embedding server %d: %s", index, error)
            return None
        sock.settimeout(REPLY_TIMEOUT)
        self._links[index] = link = _Link(server, sock)
        return link


class _Link:
    """A connection to one server; it is closed after an error."""

    def __init__(self, server: PlacedServer, sock: socket.socket) -> None:
        self.server = server
        self.sock: socket.socket | None = sock
        self.waiting = False
        """Whether a request has no reply yet: the next request must not take that one for its own."""
        self._receiver = wire.FrameReceiver(sock)

    def send(self, frame: RowFrame, parts: tuple[NDArray[np.generic], ...]) -> bool:
        """Send a request; return False if that failed."""
        try:
            assert self.sock is not None
            self.waiting = True
            wire.send(self.sock, frame, *parts)
        except OSError:
            self.close()
            return False
        return True

    def receive(self) -> RowFrame | None:
        """Return the reply; None if there is none."""
        try:
            reply = self._receiver.receive()
        except OSError:
            self.close()
            return None
        self.waiting = False
        return reply

    def close(self) -> None:
        """Close the connection."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.close()
            self.sock, self.waiting = None, False


def _chunks(count: int, dim: int) -> list[Slots]:
    most = min(CHUNK_KEYS, CHUNK_BYTES // (4 * dim))
    return [np.arange(first, min(first + most, count)) for first in range(0, count, most)]


def _summed(keys: Keys, gradients: Rows) -> tuple[Keys, Rows]:
    """Return distinct keys with the sums of their gradients, in the order in which a table adds them."""
    distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    sums = gradients[first]
    later = np.ones(len(keys), np.bool_)
    later[first] = False
    np.add.at(sums, inverse[later], gradients[later])
    return distinct, sums
