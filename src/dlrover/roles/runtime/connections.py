"""A caller's connection to one member of a role, on which many calls may be under way."""

from __future__ import annotations

import itertools
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from dlrover._util import decoding, sockets
from dlrover.errors import InfrastructureError, ProtocolError, RemoteError
from dlrover.roles.messages import MemberView
from dlrover.roles.runtime import payload, wire
from dlrover.roles.runtime.wire import CallFrame, CallOp

logger = logging.getLogger(__name__)


class CallReturned(NamedTuple):
    """The method has returned."""

    value: Any


class CallFailed(NamedTuple):
    """The method has raised, or there is none."""

    error: Exception


class CallLost(NamedTuple):
    """The member is gone."""

    began: bool
    """True if the member may have run the method, or a part of it."""
    why: str


CallOutcome: TypeAlias = CallReturned | CallFailed | CallLost


class EncodedCall(NamedTuple):
    """A call, ready to be sent."""

    method: str
    head: bytes
    buffers: list[memoryview]


class MemberConnection:
    """A connection to one life of a member. Threads of its own connect, send and receive; any thread may call.

    Args:
        member: The member.
        connect: Returns a socket to it.
    """

    def __init__(self, member: MemberView, connect: Callable[[], socket.socket]) -> None:
        self.place, self._connect = member.place, connect
        self.closed = False
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._unsent: queue.SimpleQueue[tuple[int, EncodedCall] | None] = queue.SimpleQueue()
        self._waiting: dict[int, tuple[str, Callable[[CallOutcome], None]]] = {}
        self._sent: set[int] = set()
        try:
            threading.Thread(target=self._run, name=f"roles-from-{self.place}", daemon=True).start()
        except RuntimeError as error:  # threads are short: the calls wait, and come again
            self._end(str(error))

    def call(self, call: EncodedCall, done: Callable[[CallOutcome], None]) -> None:
        """Send a call; ``done`` gets its outcome, on another thread or at once."""
        with self._lock:
            closed, number = self.closed, next(self._numbers)
            if not closed:
                self._waiting[number] = call.method, done
                self._unsent.put((number, call))
        if closed:
            done(CallLost(began=False, why="the connection has ended"))

    def close(self) -> None:
        """End the connection: calls that are under way are lost."""
        with self._lock:
            self.closed = True
            sock = self._sock
        if sock is not None:
            sockets.end(sock)

    def _run(self) -> None:
        why = "the connection has ended"
        try:
            sock = self._connect()
            memory = wire.BodyMemory()
            if self._open(sock):
                while True:
                    self._take(wire.receive(sock, memory))
        except (OSError, RuntimeError, InfrastructureError, ProtocolError) as error:
            why = str(error)
            if isinstance(error, ProtocolError):  # no calls will ever get through
                logger.warning("%s: %s", self.place, why)
        finally:
            self._end(why)

    def _open(self, sock: socket.socket) -> bool:
        """Begin to send; return False if it is closed already."""
        with self._lock:
            if self.closed:
                sock.close()
                return False
            self._sock = sock
        name = f"roles-to-{self.place}"
        threading.Thread(target=self._send, args=(sock,), name=name, daemon=True).start()
        return True

    def _send(self, sock: socket.socket) -> None:
        while (unsent := self._unsent.get()) is not None:
            number, call = unsent
            with self._lock:
                if self.closed:
                    return
                self._sent.add(number)
            try:
                wire.send(sock, CallOp.CALL, number, call.head, call.buffers)
            except OSError as error:
                logger.debug("%s takes no calls: %s", self.place, error)
                sockets.end(sock)  # the thread that receives tells the callers
                return

    def _take(self, frame: CallFrame) -> None:
        with self._lock:
            method, done = self._waiting.pop(frame.call, ("", None))
            self._sent.discard(frame.call)
        if done is not None:
            done(_outcome(f"{self.place}: {method}", frame))

    def _end(self, why: str) -> None:
        with self._lock:
            self.closed = True
            waiting, self._waiting = self._waiting, {}
            sent, self._sent = self._sent, set()
            sock, self._sock = self._sock, None
        self._unsent.put(None)
        if sock is not None:
            sockets.end(sock)
        for number, (_, done) in waiting.items():
            done(CallLost(number in sent, why))


def _outcome(where: str, frame: CallFrame) -> CallOutcome:
    try:
        if frame.op is CallOp.RESULT:
            return CallReturned(payload.decode(frame.head, frame.body))
        if frame.op is CallOp.RAISED:
            kind, text, traceback = decoding.msgpack(frame.head, tuple[str, str, str])
            return CallFailed(RemoteError(where, kind, text, traceback))
        return CallFailed(ProtocolError(frame.head.decode(errors="replace")))
    except Exception as error:  # noqa: BLE001 - whatever it is, the caller must get it: a type without its module too
        return CallFailed(ProtocolError(f"{where}: its answer cannot be read: {error}"))
