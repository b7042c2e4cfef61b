"""Frames of calls between processes of roles, on a TCP connection or on a Unix socket of one machine.

A frame is a header, its head (MessagePack) and its body: the raw memory of the arrays in the head, each at a
multiple of `ALIGNMENT`. Each end proves at the start that it knows the job's secret. Nothing is executable.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import hmac
import math
import select
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlrover._util import framing, handshake, sockets
from dlrover.checkpoint.saver import certificates
from dlrover.errors import InfrastructureError, ProtocolError
from dlrover.roles.messages import CallAddress
from dlrover.roles.runtime.payload import ALIGNMENT, Bytes

_HEADER = struct.Struct("<4sB3xIQQ")
_MAGIC = b"DLR\x01"
MAX_HEAD = 1 << 28
"""Maximum bytes of a head: arrays are not in it."""
MAX_BODY = 1 << 38
"""Maximum bytes of a body."""
CONNECT_TIMEOUT = 5.0
SEND_TIMEOUT = 60
"""Seconds without progress after which a peer that takes no bytes counts as gone: others wait for their turn."""
LOOK = 1.0
"""Seconds between two looks at whether a connection with TLS is still open, while its peer is silent."""
RECORDS = 1 << 20
"""Bytes that are encrypted at once; meanwhile nothing is received."""
SMALL = 1 << 20
"""Bytes of a body from which on its memory is worth to be kept."""
KEPT = 2
"""Bodies of one connection whose memory is kept."""
UNUSED = 3
"""References to memory that no one else uses: the list's, the loop's and that of the question."""
_PADDING = bytes(ALIGNMENT)


class CallOp(enum.IntEnum):
    """What a frame is."""

    CALL = 1
    """Name of the method, arguments and named arguments."""
    RESULT = 2
    RAISED = 3
    """Type, message and traceback of what the method has raised."""
    PING = 4
    """Answered while methods run, by `Health`."""
    REFUSED = 5
    """Why there is no such call."""
    HOLD = 6
    """About memory with weights: a `HoldRequest`."""


class CallFrame(NamedTuple):
    """A frame."""

    op: CallOp
    call: int
    """Number of the call on its connection."""
    head: bytes = b""
    body: Bytes | None = None


def secret_of(token: str) -> bytes:
    """Return the secret of a job's processes."""
    return hmac.digest(token.encode(), b"roles", "sha256")


def send(
    sock: socket.socket,
    op: CallOp,
    call: int,
    head: bytes = b"",
    buffers: Sequence[memoryview] = (),
) -> None:
    """Send a frame without copying its buffers."""
    body = sum(-(-view.nbytes // ALIGNMENT) * ALIGNMENT for view in buffers)
    waiting = [memoryview(_HEADER.pack(_MAGIC, op, len(head), call, body) + head)]
    for view in buffers:
        if view.nbytes:
            waiting.append(view)
        if view.nbytes % ALIGNMENT:
            waiting.append(memoryview(_PADDING)[: -view.nbytes % ALIGNMENT])
    sockets.send_all(sock, waiting)


class BodyMemory:
    """Memory of the bodies of one connection: used again once no array of a body lives, since new memory is slow."""

    def __init__(self) -> None:
        self._known: list[Bytes] = []

    def take(self, size: int) -> Bytes:
        """Return memory for a body."""
        if size < SMALL:
            return np.empty(size, np.uint8)
        for known in self._known:
            if sys.getrefcount(known) == UNUSED and size <= known.nbytes <= 2 * size:
                return known[:size]
        self._known = [*self._known[1 - KEPT :], np.empty(size, np.uint8)]
        return self._known[-1][:size]


def receive(sock: socket.socket, memory: BodyMemory | None = None) -> CallFrame:
    """Return the next frame, its body in ``memory`` or in memory of its own.

    Raises:
        ConnectionError: The peer has closed the connection.
        ProtocolError: The bytes are no frame.
    """
    header = bytearray(_HEADER.size)
    framing.fill(memoryview(header), sock.recv_into)
    magic, op, head_size, call, body_size = _HEADER.unpack(header)
    if magic != _MAGIC or op not in CallOp.__members__.values():
        raise ProtocolError(f"A call begins with {magic!r} and operation {op}, not {_MAGIC!r}.")
    if head_size > MAX_HEAD or body_size > MAX_BODY:
        raise ProtocolError(
            f"A call has a head of {head_size} bytes and a body of {body_size}; {MAX_HEAD} and {MAX_BODY} are"
            " accepted."
        )
    head = bytearray(head_size)
    framing.fill(memoryview(head), sock.recv_into)
    body = None
    if body_size:
        body = (memory or BodyMemory()).take(body_size)
        framing.fill(memoryview(body), sock.recv_into)
    return CallFrame(CallOp(op), call, bytes(head), body)


def packed(head: bytes, buffers: Sequence[memoryview]) -> bytes:
    """Return a head and its buffers as bytes; they are copied."""
    parts: list[bytes | memoryview] = [len(head).to_bytes(8, "little"), head, bytes(-len(head) % 8)]
    for view in buffers:
        parts += [view, bytes(-view.nbytes % ALIGNMENT)]
    return b"".join(parts)


def unpacked(data: bytes) -> tuple[bytes, Bytes]:
    """Return what `packed` took; the arrays can be written to."""
    size = int.from_bytes(data[:8], "little")
    start = 8 + size + -size % 8
    return data[8 : 8 + size], np.frombuffer(bytearray(data[start:]), np.uint8)


def connect(
    address: CallAddress,
    machine: str,
    secret: bytes,
    timeout: float = CONNECT_TIMEOUT,
    *,
    tls: bool = False,
) -> socket.socket:
    """Return a connection to a process of the job: by its Unix socket if it runs on this ``machine``.

    With ``tls``, a process of another machine must show the certificate of its address.

    Raises:
        OSError: There is no connection within ``timeout`` seconds.
        ProtocolError: With ``tls``, the process has no certificate, or shows another one.
        InfrastructureError: Another program answers at the address.
    """
    if address.local and address.machine == machine:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout)
        try:
            sock.connect(f"\0{address.local}")
        except BaseException:
            sock.close()
            raise
    else:
        sock = socket.create_connection((address.host, address.port), timeout)
        if tls or address.fingerprint:
            sock = _secured(sock, address)
    if not handshake.offer(sock, secret):
        raise InfrastructureError(f"{address.host}:{address.port} is no process of this job.")
    sock.settimeout(None)
    bound_sends(sock)
    return sock


def _secured(sock: socket.socket, address: CallAddress) -> socket.socket:
    try:
        return certificates.connect(sock, address.fingerprint, SecuredSocket)
    except ProtocolError as error:
        sock.close()
        if isinstance(error.__cause__, ssl.SSLEOFError):  # it has died just now
            raise ConnectionResetError("the peer has closed the connection") from error
        raise ProtocolError(
            f"{address.host}:{address.port} is no process of this job: {error}"
        ) from error


class SecuredSocket(ssl.SSLSocket):
    """A TLS connection that one thread may read while others write to it, once `share` was called.

    OpenSSL bears one thread at a time, so that none may wait inside it.
    """

    _lock: threading.Lock | None = None
    _reading: float | None = None
    """Time-outs in seconds."""
    _writing = float(SEND_TIMEOUT)

    def share(self, seconds: float) -> None:
        """Let several threads use it; sending fails after ``seconds`` without progress."""
        self._reading, self._writing = self.gettimeout(), seconds
        self.setblocking(False)
        self._lock = threading.Lock()

    def settimeout(self, value: float | None) -> None:
        """Set the time-out, which is that of receiving once the connection is shared."""
        if self._lock is None:
            super().settimeout(value)
        else:
            self._reading = value

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive some bytes."""
        if self._lock is None:
            return super().recv_into(buffer, nbytes, flags)
        return self._alone(
            functools.partial(super().recv_into, buffer, nbytes, flags), self._reading
        )

    def sendmsg(self, buffers: Sequence[memoryview], *_: Any) -> int:  # type: ignore[override]
        """Send the first of the buffers, or a part of it."""
        return self._alone(functools.partial(self.send, buffers[0][:RECORDS]), self._writing)

    def _alone(self, what: Callable[[], int], timeout: float | None) -> int:
        assert self._lock is not None
        left = math.inf if timeout is None else timeout
        while True:
            with self._lock:
                fd = self.fileno()
                if fd < 0:
                    raise OSError(errno.EBADF, "the connection is closed")
                try:
                    return what()
                except ssl.SSLWantReadError:
                    wanted = select.POLLIN
                except ssl.SSLWantWriteError:
                    wanted = select.POLLOUT
            ready = select.poll()
            ready.register(fd, wanted)
            # Another thread may close the connection just now, and its number be another file's.
            if not ready.poll(1000 * min(LOOK, left)) and (left := left - LOOK) <= 0:
                raise TimeoutError("the peer is silent")

    def shutdown(self, how: int) -> None:
        """End the connection; nothing goes out without TLS after it, as with the inherited method."""
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        """Close it when no other thread is inside OpenSSL."""
        with self._lock or contextlib.nullcontext():
            super().close()


def bound_sends(sock: socket.socket) -> None:
    """Let sends to a peer that is stopped fail with an OSError after a while; receiving may take for ever."""
    if isinstance(sock, SecuredSocket):
        sock.share(SEND_TIMEOUT)
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_TIMEOUT, 0))
