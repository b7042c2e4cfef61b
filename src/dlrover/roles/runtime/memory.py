"""Connections to the processes that keep weights, and the memory of parts as this process sees it."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import weakref
from typing import Any

import msgspec
import numpy as np

from dlrover._util import decoding, sockets
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError
from dlrover.roles.messages import CallAddress
from dlrover.roles.runtime import wire
from dlrover.roles.runtime.holding import (
    MAX_READ,
    ClosePart,
    Held,
    HoldRequest,
    OpenPart,
    ReadPart,
    ReservePart,
)
from dlrover.roles.runtime.link import check_process
from dlrover.roles.runtime.payload import Bytes
from dlrover.roles.runtime.wire import CallOp

ANSWER_TIMEOUT = 120.0
"""Seconds without progress after which a process that keeps weights counts as gone; large memory takes a while."""
MADV_POPULATE_READ = 22
"""Enters memory in the page tables at once, without a copy of it: that takes as long as half a copy."""
KEPT = 4
"""Mappings that a connection keeps, as later parts lie in the same memory."""


class HolderConnection:
    """A connection to a process that keeps weights. Any thread may use it.

    Raises:
        OSError: Every method does if the process is gone.
    """

    def __init__(
        self, address: CallAddress, machine: str, secret: bytes, *, tls: bool = False
    ) -> None:
        self._sock = wire.connect(address, machine, secret, tls=tls)
        self._sock.settimeout(ANSWER_TIMEOUT)
        self.local = self._sock.family == socket.AF_UNIX
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._written: dict[int, mmap.mmap] = {}
        self._seen: dict[int, Bytes] = {}
        self._ended: list[ClosePart] = []
        """About parts that are read no more; to be said before the next request."""

    def ask(self, request: HoldRequest) -> tuple[Held, int, Bytes | None]:
        """Return the reply, the file that came with it or -1, and the body.

        Raises:
            ConfigurationError: The request was refused, or this is a fork of the process that joined.
        """
        check_process(self._pid)
        with self._lock:
            while self._ended:
                self._ask(self._ended.pop())
            return self._ask(request)

    def _ask(self, request: HoldRequest) -> tuple[Held, int, Bytes | None]:
        try:
            return self._answer(request)
        except ConfigurationError:
            raise
        except BaseException:
            self.close()  # a late answer must not be taken for that of the next request
            raise

    def _answer(self, request: HoldRequest) -> tuple[Held, int, Bytes | None]:
        wire.send(self._sock, CallOp.HOLD, 0, msgspec.msgpack.encode(request))
        frame = wire.receive(self._sock)
        if frame.op is CallOp.REFUSED:
            raise ConfigurationError(frame.head.decode(errors="replace"))
        if frame.op is not CallOp.RESULT:
            raise ProtocolError(f"A process that keeps weights answered {frame.op.name}.")
        fd = -1
        if self.local and isinstance(request, ReservePart | OpenPart):
            _, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
            if not fds:
                raise ConnectionResetError("the memory of weights has not come")
            fd = fds[0]
        return decoding.msgpack(frame.head, Held), fd, frame.body

    @property
    def closed(self) -> bool:
        """True once it has ended here."""
        return self._sock.fileno() < 0

    def close(self) -> None:
        """End the connection; what was read stays as it is."""
        sockets.end(self._sock)

    def writable(self, key: str, nbytes: int) -> mmap.mmap:
        """Return memory for a part; the same mapping again where the memory is the same.

        Raises:
            InfrastructureError: Memory is short.
        """
        with self._lock:
            try:
                held, fd, _ = self.ask(ReservePart(key, nbytes))
            except ConfigurationError as error:
                raise InfrastructureError(str(error)) from error
            try:
                if held.buffer not in self._written:
                    self._written[held.buffer] = mmap.mmap(fd, held.size)
                    _limit(self._written)
            except BaseException:
                self.close()
                raise
            finally:
                os.close(fd)
            return self._written[held.buffer]

    def read(self, key: str) -> PartReader:
        """Return a complete part.

        Raises:
            ConfigurationError: It is not there any more.
        """
        held, fd, _ = self.ask(OpenPart(key))
        if fd < 0:
            return PartReader(self, key, held, None)
        try:
            private = mmap.mmap(fd, held.size, flags=mmap.MAP_PRIVATE)
            return PartReader(self, key, held, (self._view(held, fd), private))
        except BaseException:
            self.ended(key, _forks)
            raise
        finally:
            os.close(fd)

    def _view(self, held: Held, fd: int) -> Bytes:
        """Return memory to be read only; the same mapping again where the memory is the same."""
        with self._lock:
            if held.buffer not in self._seen:
                shared = mmap.mmap(fd, held.size, access=mmap.ACCESS_READ)
                _populate(shared)
                self._seen[held.buffer] = np.frombuffer(shared, np.uint8)
                _limit(self._seen)
            return self._seen[held.buffer]

    def ended(self, key: str, fork: int) -> None:
        """Note that a part is read no more, and how many forks there were before; this may be called anywhere."""
        self._ended.append(ClosePart(key, forked=fork != _forks))


_forks = 0
"""How often this process was forked."""


def _note_fork() -> None:
    global _forks  # noqa: PLW0603 - of the process
    _forks += 1


os.register_at_fork(before=_note_fork)


def _populate(mapped: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # a kernel before 5.14
        mapped.madvise(MADV_POPULATE_READ)


def _limit(mappings: dict[int, Any]) -> None:
    """Give up the oldest mappings."""
    while len(mappings) > KEPT:
        del mappings[next(iter(mappings))]


class PartReader:
    """The memory of one part, which stays as it is while an array of it lives.

    On the holder's machine the arrays are its memory, copied on write; elsewhere they are read over the connection.

    Args:
        mapped: The memory to be read only, and the memory of the arrays; None: it is on another machine.
    """

    def __init__(
        self,
        connection: HolderConnection,
        key: str,
        held: Held,
        mapped: tuple[Bytes, mmap.mmap] | None,
    ) -> None:
        self.held = held
        self._connection, self._key = connection, key
        self._shared = mapped[0] if mapped is not None else None
        self._untouched = mapped[1] if mapped is not None else None
        self._memory = np.frombuffer(mapped[1], np.uint8) if mapped is not None else None
        # The last array to go says that the memory may be used again.
        owner: Any = self._memory if self._memory is not None else self
        weakref.finalize(owner, connection.ended, key, _forks)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Return a piece of the memory to copy or check at once, while this object lives.

        Raises:
            InfrastructureError: The holder has gone.
        """
        if self._shared is None:
            return self.bytes(offset, nbytes)
        return self._shared[offset : offset + nbytes]

    def bytes(self, offset: int, nbytes: int) -> Bytes:
        """Return a piece of the memory for an array.

        Raises:
            InfrastructureError: The holder has gone.
        """
        if (untouched := self._untouched) is not None:  # another thread may be here, too
            _populate(untouched)
            self._untouched = None
        if self._memory is not None:
            return self._memory[offset : offset + nbytes]
        whole = np.empty(nbytes, np.uint8)
        done = 0
        while done < nbytes:
            wanted = min(MAX_READ, nbytes - done)
            try:
                _, _, body = self._connection.ask(ReadPart(self._key, offset + done, wanted))
            except OSError as error:
                raise InfrastructureError(
                    f"The process that keeps the weights has gone: {error}."
                ) from error
            if body is None:
                raise ProtocolError("A part of weights is shorter than its index says.")
            got = body[:wanted]
            whole[done : done + wanted] = got
            done += wanted
        return whole
