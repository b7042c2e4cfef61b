"""Replicas between nodes: a saver sends copies of its node's memory to others and receives theirs.

No rank waits for a replica. Each step that a rank commits is sent to the other nodes in the background.
If the rank needs the memory again before all of it is sent, the rest is given up for a newer step.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import re
import socket
import ssl
import threading
import time

import xxhash

from dlrover._util import sockets
from dlrover.checkpoint.saver import certificates, wire
from dlrover.checkpoint.saver.exchange import Copy, Exchange, SupersededError
from dlrover.checkpoint.saver.protocol import JoinSaver, Peer, Replication
from dlrover.checkpoint.saver.ranks import SaveGroup
from dlrover.checkpoint.storage import faults, formats
from dlrover.checkpoint.storage.formats import FORMAT, OtherFormatError
from dlrover.errors import InfrastructureError, ProtocolError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0
"""Seconds to connect to another saver, and for it to identify itself."""
PATIENCE = 30.0
"""Seconds that another saver may take for one message, or to check a replica."""
BACK_OFF = (0.2, 30.0)
"""Seconds before another attempt to reach a saver: the first delay, and the longest."""


class TokenBucket:
    """Rate limiter that never lets the sender get more than ``burst`` bytes ahead of the rate.

    Args:
        rate: bytes per second.
        burst: bytes that may be sent at once after a pause.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = float("-inf")

    def take(self, nbytes: int, now: float) -> float:
        """Count ``nbytes``; return the seconds to wait before sending them. ``now`` is in seconds."""
        if self._at > float("-inf"):
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        self._level -= nbytes
        return max(0.0, -self._level / self._rate)


class ReplicaExchange:
    """Sender and receiver of replicas. Methods may be called from any thread."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._lock = threading.Lock()
        self._listeners: dict[str, socket.socket] = {}
        self._sending: SaveGroup | None = None
        self._pem = ""

    def certify(self, *, tls: bool) -> str:
        """Turn TLS on or off for later connections; return this saver's key and certificate, if any.

        Raises:
            ConfigurationError: the certificate cannot be made.
        """
        with self._lock:
            if not tls:
                self._pem = ""
            elif not self._pem:
                self._pem = certificates.make()
            return self._pem

    def listen(self, host: str, port: int) -> int:
        """Accept replicas at an address of this node; return the port. Port 0 means any free one.

        Raises:
            OSError: the address is not available.
        """
        with self._lock:
            listener = self._listeners.get(host)
            if listener is None:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listener = socket.create_server((host, port), family=family)
                self._listeners[host] = listener
                accept = threading.Thread(
                    target=sockets.serve_each,
                    args=(listener, self._receive, "replica"),
                    daemon=True,
                )
                accept.start()
            return int(listener.getsockname()[1])

    def close(self) -> None:
        """Stop accepting connections."""
        with self._lock:
            for listener in self._listeners.values():
                sockets.end(listener)
            self._listeners.clear()

    def join(self, joined: JoinSaver) -> None:
        """Start sending what a world saves, and stop sending for any other world."""
        group, plan = self._exchange.group(), joined.replication
        if plan is None or group is None or group.joined.session != joined.session:
            return
        with self._lock:
            if self._sending is group:
                return
            self._sending = group
            self._pem = plan.pem
        try:  # a saver that has just started does not listen yet
            self.listen(plan.own.host, plan.own.port)
        except OSError as error:
            logger.warning("No replicas are taken on %s: %s", plan.own.host, error)
        bucket = None
        if plan.bandwidth is not None:
            bucket = _Limit(TokenBucket(plan.bandwidth, min(plan.bandwidth, 4 * wire.CHUNK)))
        for peer in plan.peers:
            sender = Sender(self._exchange, group, plan, peer, bucket)
            threading.Thread(target=sender.run, daemon=True).start()

    # ---- receive

    def _receive(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            address = str(sock.getpeername()[0])
        except OSError:  # the peer has left
            sock.close()
            return
        Receiver(self._exchange, sock, address, self._pem).run()


class _Limit:
    """Token bucket for several threads."""

    def __init__(self, bucket: TokenBucket) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> float:
        with self._lock:
            return self._bucket.take(nbytes, time.monotonic())


class _Problems:
    """Log that says each problem of a rank once, even if the numbers in it change."""

    def __init__(self) -> None:
        self._said: set[tuple[int, str]] = set()

    def say(self, problem: str, rank: int = -1) -> None:
        """Log a problem unless it was logged before; ``rank`` is -1 if it concerns no single rank."""
        kind = rank, re.sub(r"\d+", "#", problem)
        if kind not in self._said:
            logger.warning("%s", problem)
            self._said.add(kind)


class Receiver:
    """One connection from another saver."""

    def __init__(self, exchange: Exchange, sock: socket.socket, address: str, pem: str) -> None:
        self._exchange = exchange
        self._sock = sock
        self._address = address
        self._pem = pem
        self._problems = _Problems()

    def run(self) -> None:
        """Receive replicas until the other saver is gone."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            try:
                self._sock.settimeout(CONNECT_TIMEOUT)
                with self._secured() as self._sock:
                    self._attend()
            except (ProtocolError, OtherFormatError, ssl.SSLError) as error:
                logger.warning("The saver at %s is not listened to: %s", self._address, error)
            except SupersededError as error:  # the data in transit is useless now
                logger.info("A replica of the saver at %s is given up: %s", self._address, error)

    def _secured(self) -> socket.socket:
        return certificates.accept(self._sock, self._pem) if self._pem else self._sock

    def _attend(self) -> None:
        group = self._greet()
        while group is not None:
            self._sock.settimeout(None)  # no limit, until the next step comes
            offer = wire.expect(self._sock, wire.GenerationOffer)
            if not self._exchange.wait(group, 0.0):
                return
            self._sock.settimeout(PATIENCE)
            self._take(group, offer)

    def _greet(self) -> SaveGroup | None:
        hello = wire.expect(self._sock, wire.SaverHello, wire.MAX_HELLO)
        try:
            formats.check(hello.format, f"The replica from {self._address}")
        except OtherFormatError as error:
            wire.send(self._sock, wire.TransferReply(wanted=False, problem=str(error)))
            raise
        group = self._exchange.group()
        plan = group.joined.replication if group is not None else None
        if group is None or plan is None or hello.session != group.joined.session:
            wire.send(
                self._sock, wire.TransferReply(wanted=False, problem="There is another world.")
            )
            return None
        if not hmac.compare_digest(hello.token, plan.token):
            raise ProtocolError("It does not know the token of the world.")
        wire.send(self._sock, wire.TransferReply(wanted=True))
        return group

    def _take(self, group: SaveGroup, offer: wire.GenerationOffer) -> None:
        header = offer.header
        try:
            copy = self._exchange.begin(group, header)
        except (InfrastructureError, OSError) as error:
            self._refuse(header.rank, f"No replica of rank {header.rank} is taken: {error}")
            return
        if copy is None:  # the replica is already here
            wire.send(self._sock, wire.TransferReply(wanted=False))
            return
        try:
            wire.send(self._sock, wire.TransferReply(wanted=True))
            sums_hash = self._receive(copy)
            if sums_hash is not None:
                self._admit(copy, sums_hash)
        finally:
            self._exchange.end(header)

    def _admit(self, copy: Copy, sums_hash: int) -> None:
        try:
            self._exchange.admit(copy, sums_hash)
        except InfrastructureError as error:
            rank = copy.header.rank
            self._refuse(rank, f"A replica of rank {rank} is not taken: {error}")
        else:
            wire.send(self._sock, wire.TransferReply(wanted=True))

    def _receive(self, copy: Copy) -> int | None:
        """Receive a copy; return the hash of its checksums, or None if the sender gives up."""
        end = 0
        while True:
            message = wire.receive(self._sock)
            if isinstance(message, wire.Chunk) and message.offset == end and message.data:
                self._exchange.fill(copy, message.offset, message.data)
                end += len(message.data)
            elif isinstance(message, wire.CommitGeneration) and end == copy.nbytes:
                return message.sums_hash
            elif isinstance(message, wire.GiveUp):
                return None
            else:
                raise ProtocolError(f"It sent {type(message).__name__} at byte {end}.")

    def _refuse(self, rank: int, problem: str) -> None:
        self._problems.say(problem, rank)
        wire.send(self._sock, wire.TransferReply(wanted=False, problem=problem))


class Sender:
    """Sender of a world's steps to one other saver."""

    def __init__(
        self,
        exchange: Exchange,
        group: SaveGroup,
        plan: Replication,
        peer: Peer,
        limit: _Limit | None,
    ) -> None:
        self._exchange = exchange
        self._group = group
        self._plan = plan
        self._peer = peer
        self._limit = limit
        self._sent: dict[int, int] = {}
        """Number of the newest save that was sent or not wanted, by rank."""
        self._problems = _Problems()

    def run(self) -> None:
        """Send until another world begins."""
        delay = BACK_OFF[0]
        while self._exchange.wait(self._group, 0.0):
            before = len(self._sent), sum(self._sent.values())
            try:
                self._connect_and_send()
            except (OSError, ProtocolError, InfrastructureError) as error:
                self._problems.say(
                    f"No replicas reach {self._peer.host}:{self._peer.port}: {error}"
                )
            if before != (len(self._sent), sum(self._sent.values())):
                delay = BACK_OFF[0]
            self._exchange.wait(self._group, delay)
            delay = min(2 * delay, BACK_OFF[1])

    def _connect_and_send(self) -> None:
        if self._exchange.next(self._group, self._sent) is None:
            return
        with self._connected() as sock:
            wire.send(sock, wire.SaverHello(self._group.joined.session, self._plan.token, FORMAT))
            answer = wire.expect(sock, wire.TransferReply)
            if not answer.wanted:
                raise InfrastructureError(answer.problem)
            sock.settimeout(PATIENCE)
            while (copy := self._exchange.next(self._group, self._sent)) is not None:
                self._send(sock, copy)
                self._sent[copy.header.rank] = copy.header.save.number

    def _connected(self) -> socket.socket:
        sock = socket.create_connection((self._peer.host, self._peer.port), CONNECT_TIMEOUT)
        return certificates.connect(sock, self._peer.fingerprint) if self._plan.pem else sock

    def _send(self, sock: socket.socket, copy: Copy) -> None:
        faults.point("replicate.begun")
        wire.send(sock, wire.GenerationOffer(copy.header))
        answer = wire.expect(sock, wire.TransferReply)
        self._note(copy, answer)
        if not answer.wanted:
            return
        sums_hash = xxhash.xxh3_64_intdigest(copy.sums)
        for start in range(0, copy.nbytes, wire.CHUNK):
            data = bytes(copy.generation.data[start : min(start + wire.CHUNK, copy.nbytes)])
            delay = self._limit.take(len(data)) if self._limit is not None else 0.0
            if not self._exchange.pause(copy, delay):
                self._problems.say(
                    "A step was not sent in time: saves come faster than replicas are sent."
                )
                wire.send(sock, wire.GiveUp())
                return
            wire.send(sock, wire.Chunk(start, data))
        faults.point("replicate.sent")
        wire.send(sock, wire.CommitGeneration(sums_hash))
        self._note(copy, wire.expect(sock, wire.TransferReply))

    def _note(self, copy: Copy, answer: wire.TransferReply) -> None:
        if answer.problem:
            self._problems.say(
                f"{self._peer.host}:{self._peer.port} says: {answer.problem}", copy.header.rank
            )
