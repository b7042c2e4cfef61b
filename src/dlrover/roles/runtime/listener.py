"""Takes the calls of other roles, and runs them in threads of this process."""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import ssl
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from dlrover._util import handshake, sockets
from dlrover.checkpoint.saver import certificates
from dlrover.errors import DLRoverError, ProtocolError
from dlrover.roles.messages import WORK, CallAddress
from dlrover.roles.runtime import payload, wire
from dlrover.roles.runtime.exporting import ExportedMethod, Exports
from dlrover.roles.runtime.holding import HeldParts, Session, decode_hold
from dlrover.roles.runtime.phases import Phases
from dlrover.roles.runtime.wire import CallFrame, CallOp

logger = logging.getLogger(__name__)

CONCURRENT = 32
"""Maximum number of concurrent methods that run at once."""

MAX_STRANGERS = 256
"""Maximum number of connections whose callers have not proved yet that they know the secret; the oldest ends first."""


class CallState(msgspec.Struct, frozen=True, array_like=True):
    """What a member answers while its methods run: that it lives, not that it makes progress."""

    running: tuple[tuple[str, float], ...] = ()
    """Methods that run, and for how many seconds."""
    waiting: int = 0
    """Calls that wait for their turn."""
    done: int = 0
    """Calls that have ended."""


class _Call(NamedTuple):
    connection: _Connection
    frame: CallFrame
    method: str
    exported: ExportedMethod


class CallListener:
    """Listens once made. Calls run one after the other, except those of concurrent functions.

    Args:
        exports: Functions to call.
        host: Address to listen on.
        machine: Id of this machine.
        secret: Secret of the job's processes.
        holding: Weights that this process keeps.
        phases: Learns of the calls.
        pem: Key and certificate of this process for TLS with other machines; empty: without TLS.
    """

    def __init__(
        self,
        exports: Exports,
        host: str,
        machine: str,
        secret: bytes,
        holding: HeldParts,
        phases: Phases,
        pem: str = "",
    ) -> None:
        self._pem = pem
        self._holding, self._phases = holding, phases
        self._exports, self._secret = exports, secret
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(CONCURRENT, thread_name_prefix="roles-concurrent")
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}
        """Those of them that have not proved yet that they know the secret, oldest first."""
        self._lock = threading.Lock()
        self._running: dict[int, tuple[str, float]] = {}
        self._done = 0
        self._closed = threading.Event()
        self._tcp = socket.create_server((host, 0), backlog=1024)
        local = f"dlrover-roles-{secrets.token_hex(12)}"
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind(f"\0{local}")
        self._unix.listen(1024)
        shown = certificates.fingerprint(pem) if pem else b""
        self.address = CallAddress(host, self._tcp.getsockname()[1], machine, local, shown)
        for sock in (self._tcp, self._unix):
            threading.Thread(
                target=sockets.serve_each,
                args=(sock, self._serve, "roles-connection"),
                name="roles-accept",
                daemon=True,
            ).start()
        threading.Thread(target=self._run, name="roles-calls", daemon=True).start()

    def close(self) -> None:
        """Close all connections; a method that runs ends by itself."""
        self._closed.set()
        self._calls.put(None)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for sock in (self._tcp, self._unix, *self._open):
            sockets.end(sock)

    def state(self) -> CallState:
        """Return what runs now."""
        now = time.monotonic()
        with self._lock:
            running = tuple((method, now - began) for method, began in self._running.values())
        return CallState(running, self._calls.qsize(), self._done)

    def _greet(self, sock: socket.socket) -> None:
        """Take a new connection; end the oldest of too many that prove nothing: each has a thread."""
        with self._lock:
            oldest = next(iter(self._strangers)) if len(self._strangers) >= MAX_STRANGERS else None
            self._strangers[sock] = None
            if oldest is not None:
                del self._strangers[oldest]
                sockets.shut_down(oldest)

    def _secured(self, sock: socket.socket) -> socket.socket:
        """Return the connection, with TLS if the job uses it and the caller may be on another machine.

        Raises:
            ProtocolError: The caller does not speak TLS.
        """
        if sock.family == socket.AF_UNIX:
            return sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._pem:
            return sock
        sock.settimeout(handshake.TIMEOUT)
        try:
            # A duplicate: the end of the first one still ends the connection.
            return certificates.accept(sock.dup(), self._pem, wire.SecuredSocket)
        except ProtocolError as error:
            if isinstance(error.__cause__, ssl.SSLEOFError):
                raise ConnectionResetError("the caller has closed the connection") from error
            raise

    def _serve(self, sock: socket.socket) -> None:
        connection, used = None, sock
        self._open.add(sock)
        try:
            self._greet(sock)
            used = self._secured(sock)
            known = handshake.accept(used, self._secret)
            wire.bound_sends(used)
            connection = _Connection(used) if known else None
            self._strangers.pop(sock, None)
            if connection is None:
                logger.warning("A caller does not know the job's secret")
            memory = wire.BodyMemory()
            while connection is not None and not self._closed.is_set():
                self._take(connection, wire.receive(used, memory))
        except ProtocolError as error:
            logger.warning("Closed a connection: %s", error)
        except OSError as error:
            logger.debug("A connection has ended: %s", error)
        finally:
            self._open.discard(sock)
            self._strangers.pop(sock, None)
            used.close()
            sock.close()
            if connection is not None and connection.session is not None:
                connection.session.end()

    def _take(self, connection: _Connection, frame: CallFrame) -> None:
        if frame.op is CallOp.PING:
            connection.reply(CallOp.RESULT, frame.call, msgspec.msgpack.encode(self.state()))
            return
        if frame.op is CallOp.HOLD:
            connection.session = connection.session or self._holding.session()
            connection.hold(frame)
            return
        if frame.op is not CallOp.CALL:
            raise ProtocolError(f"A caller sent {frame.op.name}.")
        method = _method(frame)
        exported = self._exports.get(method)
        if exported is None:
            known = ", ".join(self._exports.table()) or "none"
            why = f"There is no method {method}; there are {known}."
            connection.reply(CallOp.REFUSED, frame.call, why.encode())
            return
        call = _Call(connection, frame, method, exported)
        if exported.concurrent:
            self._pool.submit(self._answer, call)
        else:
            self._calls.put(call)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._answer(call)

    def _answer(self, call: _Call) -> None:
        """Run a method, and send what it returns or raises."""
        with self._lock:
            self._running[id(call)] = call.method, time.monotonic()
        try:
            with self._phases.entered(WORK):
                op, head, buffers = _outcome(call)
        finally:
            with self._lock:
                del self._running[id(call)]
                self._done += 1
            self._phases.progress()
        call.connection.reply(op, call.frame.call, head, buffers)


class _Connection:
    """One caller's connection, on which several threads reply."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.session: Session | None = None
        """What the caller has of the weights that are kept here."""

    def hold(self, frame: CallFrame) -> None:
        """Answer a request about memory; on a Unix socket, with its file."""
        assert self.session is not None
        try:
            reply, fd, data = self.session.handle(decode_hold(frame.head))
        except DLRoverError as error:
            self.reply(CallOp.REFUSED, frame.call, str(error).encode())
            return
        self.reply(
            CallOp.RESULT, frame.call, msgspec.msgpack.encode(reply), [data] if data else None
        )
        if fd >= 0 and self._sock.family == socket.AF_UNIX:
            socket.send_fds(self._sock, [b"F"], [fd])

    def reply(
        self, op: CallOp, call: int, head: bytes = b"", buffers: list[memoryview] | None = None
    ) -> None:
        """Send a reply; a caller that is gone needs none."""
        with self._lock:
            try:
                wire.send(self._sock, op, call, head, buffers or ())
            except OSError as error:
                logger.debug("A caller takes no reply: %s", error)
                sockets.shut_down(self._sock)  # half a reply may be out


def _method(frame: CallFrame) -> str:
    """Return the name of the method in a call, which is the first thing in its head."""
    try:
        method = payload.decode(frame.head, frame.body)[0]
    except (IndexError, TypeError) as error:
        raise ProtocolError("A call names no method.") from error
    return str(method)


def _outcome(call: _Call) -> tuple[CallOp, bytes, list[memoryview]]:
    try:
        _, args, kwargs = payload.decode(call.frame.head, call.frame.body)
        value = call.exported.function(*args, **kwargs)
        return CallOp.RESULT, *payload.encode_named(f"the result of {call.method}", value)
    except BaseException as error:  # noqa: BLE001 - it is the caller's, and the thread goes on with the next call
        own = error.__traceback__.tb_next if error.__traceback__ is not None else None
        shown = error.with_traceback(own if not isinstance(error, DLRoverError) else None)
        text = "".join(traceback.format_exception(shown))
        kind = type(error).__qualname__
        if type(error).__module__ not in ("builtins", "__main__"):
            kind = f"{type(error).__module__}.{kind}"
        return (
            CallOp.RAISED,
            msgspec.msgpack.encode((kind, _sendable(_words(error)), _sendable(text))),
            [],
        )


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the error is the user's, too
        return "its text cannot be made"


def _sendable(text: str) -> str:
    """Return a text without what UTF-8 does not have, as names of files may hold."""
    return text.encode(errors="backslashreplace").decode()
