"""Memory with weights that this process keeps: for its own job's publishers and readers.

A part of a version lies in a `memfd`: the tensors, then the index. The publisher writes it through a shared mapping;
readers on this machine map it, others read it over their connection. It outlives the publisher where another process
keeps it. Memory is used again for a later version once the job does not list the version any more and all processes that read
it have said that they do not any more.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from dlrover._util import cgroup, decoding, kernel
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError
from dlrover.roles.messages import JobView, MemberPlace

FREE = 2
"""Buffers that are kept for later versions."""
WASTE = 2
"""Maximum size of a reused buffer, as a multiple of the part."""
ORPHAN = 30.0
"""Seconds after which a complete part whose publisher is gone is dropped, if the job does not list it."""
MAX_READ = 1 << 26
"""Maximum bytes of one read over a connection."""


class ReservePart(msgspec.Struct, frozen=True, array_like=True, tag="reserve"):
    """Memory for a part that the publisher will write. The reply comes with its file."""

    key: str
    nbytes: int


class CommitPart(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """The part is complete."""

    key: str
    data_bytes: int
    index_bytes: int
    index_sum: int


class DiscardPart(msgspec.Struct, frozen=True, array_like=True, tag="discard"):
    """The part is not needed: it was not published."""

    key: str


class PartListed(msgspec.Struct, frozen=True, array_like=True, tag="listed"):
    """The job lists the part, as views from a number on show."""

    key: str
    view: int


class OpenPart(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Read a part: it stays until `ClosePart`. On a Unix socket, the reply comes with its file."""

    key: str


class ReadPart(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Bytes of an open part; they are the body of the reply."""

    key: str
    offset: int
    nbytes: int


class ClosePart(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """The caller reads the part no more."""

    key: str
    forked: bool = False
    """A fork of the caller may go on reading it."""


HoldRequest: TypeAlias = (
    ReservePart | CommitPart | DiscardPart | PartListed | OpenPart | ReadPart | ClosePart
)


class Held(msgspec.Struct, frozen=True, array_like=True):
    """Reply to each request: the part's memory."""

    buffer: int
    """Number of the memory in this process: the same memory has the same one."""
    size: int
    data_bytes: int = 0
    index_bytes: int = 0
    index_sum: int = 0


_request = decoding.msgpack_decoder(HoldRequest)


def decode_hold(data: bytes) -> HoldRequest:
    """Return a request.

    Raises:
        ProtocolError: The bytes are none.
    """
    try:
        request: HoldRequest = _request.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"A request for weights cannot be read: {error}.") from error
    return request


@dataclass
class _Buffer:
    number: int
    fd: int
    size: int


@dataclass
class _Part:
    buffer: _Buffer
    held: Held
    complete: bool = False
    listed: int = -1
    """Number of the first view that may show it; -1: unknown."""
    publisher: Session | None = None
    readers: int = 0
    since: float = field(default_factory=time.monotonic)
    wanted: bool = True
    shared: bool = False
    """Someone may still read or write its memory, who will not say when that ends."""


class HeldParts:
    """The parts that this process keeps. Any thread may use it.

    Args:
        place: This process, as the job's views name it.
    """

    def __init__(self, place: MemberPlace) -> None:
        self._place = place
        self._lock, self._allocating = threading.Lock(), threading.Lock()
        self._parts: dict[str, _Part] = {}
        self._free: list[_Buffer] = []
        self._numbers = itertools.count()

    def session(self) -> Session:
        """Return what one connection has of it."""
        return Session(self)

    def follow(self, view: JobView) -> None:
        """Drop what the job does not list any more."""
        listed = set[str]().union(
            *(weights.listed(self._place) for weights in view.weights.values())
        )
        now = time.monotonic()
        with self._lock:
            for key, part in list(self._parts.items()):
                if not part.complete:
                    continue
                if key in listed:
                    part.listed = min(view.number, part.listed) if part.listed >= 0 else view.number
                elif 0 <= part.listed <= view.number or (
                    part.listed < 0 and part.publisher is None and now - part.since > ORPHAN
                ):
                    part.wanted = False
                    self._tidy(key, part)

    @property
    def memory(self) -> int:
        """Bytes of all memory that this process keeps for weights."""
        with self._lock:
            buffers = [*self._free, *(part.buffer for part in self._parts.values())]
            return sum(buffer.size for buffer in buffers)

    def reserve(self, key: str, nbytes: int, session: Session) -> _Part:
        """Return memory for a part.

        Raises:
            ConfigurationError: There is such a part.
            InfrastructureError: Memory is short.
        """
        buffer = self._reused(key, nbytes) or self._new(nbytes)
        with self._lock:
            part = _Part(buffer, Held(buffer.number, buffer.size), publisher=session)
            if self._parts.setdefault(key, part) is not part:
                os.close(buffer.fd)
                raise ConfigurationError(f"The part {key} of weights is here already.")
            return part

    def _reused(self, key: str, nbytes: int) -> _Buffer | None:
        with self._lock:
            if key in self._parts:
                raise ConfigurationError(f"The part {key} of weights is here already.")
            fitting = [b for b in self._free if nbytes <= b.size <= WASTE * nbytes]
            if not fitting:
                return None
            buffer = min(fitting, key=lambda b: b.size)
            self._free.remove(buffer)
            return buffer

    def _new(self, nbytes: int) -> _Buffer:
        """Allocate memory, which may take seconds; meanwhile others use theirs."""
        size = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        with self._allocating:
            if size > cgroup.available_memory():
                self._release()
            if size > (left := cgroup.available_memory()):
                raise InfrastructureError(
                    f"The weights need {size >> 20} MiB more memory, and {left >> 20} MiB are available: give the machine"
                    " or the container more, or publish less."
                )
            fd = kernel.memfd_create("dlrover-weights")
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                os.close(fd)
                raise InfrastructureError(
                    f"There is no memory for {nbytes} bytes of weights: {error.strerror}."
                ) from error
        return _Buffer(next(self._numbers), fd, size)

    def _release(self) -> None:
        """Give the memory back that is kept for later versions."""
        with self._lock:
            while self._free:
                os.close(self._free.pop().fd)

    def part(self, key: str) -> _Part:
        """Return a complete part.

        Raises:
            ConfigurationError: It is not here, or no more.
        """
        part = self._parts.get(key)
        if part is None or not part.complete:
            raise ConfigurationError(f"The part {key} of weights is not here.")
        return part

    def opened(self, key: str) -> _Part:
        """Return a complete part, which stays until `closed`."""
        with self._lock:
            part = self.part(key)
            part.readers += 1
            return part

    def closed(self, key: str, *, shared: bool) -> None:
        """A reader needs a part no more; if it is ``shared``, nothing else is ever written to its memory."""
        with self._lock:
            part = self._parts[key]
            part.readers -= 1
            part.shared |= shared
            self._tidy(key, part)

    def discarded(self, key: str, session: Session) -> Held:
        """Drop a part of a publisher."""
        with self._lock:
            part = self._parts.get(key)
            if part is None or part.publisher is not session:
                raise ProtocolError(f"The part {key} of weights was not reserved.")
            part.wanted = False
            self._tidy(key, part)
            return part.held

    def left(self, session: Session) -> None:
        """A publisher is gone: what it has not completed is dropped."""
        with self._lock:
            for key, part in list(self._parts.items()):
                if part.publisher is session:
                    part.publisher, part.since = None, time.monotonic()
                    if not part.complete:
                        part.wanted, part.shared = False, True
                        self._tidy(key, part)

    def _tidy(self, key: str, part: _Part) -> None:
        if part.wanted or part.readers:
            return
        del self._parts[key]
        if part.shared:  # the kernel keeps it for whoever maps it
            os.close(part.buffer.fd)
            return
        self._free.append(part.buffer)
        while len(self._free) > FREE:
            os.close(self._free.pop(0).fd)


class Session:
    """What one connection has of the parts; one thread uses it."""

    def __init__(self, holding: HeldParts) -> None:
        self._holding = holding
        self._open: dict[str, int] = {}

    def handle(  # noqa: PLR0911 - one for each request
        self, request: HoldRequest
    ) -> tuple[Held, int, memoryview | None]:
        """Return the reply to a request, the file that goes with it or -1, and the body."""
        match request:
            case ReservePart(key, nbytes):
                part = self._holding.reserve(key, nbytes, self)
                return part.held, part.buffer.fd, None
            case CommitPart():
                return self._commit(request), -1, None
            case DiscardPart(key):
                return self._holding.discarded(key, self), -1, None
            case PartListed(key, view):
                part = self._holding.part(key)
                part.listed = view if part.listed < 0 else min(view, part.listed)
                return part.held, -1, None
            case OpenPart(key):
                part = self._holding.opened(key)
                self._open[key] = self._open.get(key, 0) + 1
                return part.held, part.buffer.fd, None
            case ReadPart():
                return self._read(request)
            case ClosePart(key, forked):
                return self._close(key, forked=forked), -1, None

    def _commit(self, request: CommitPart) -> Held:
        part = self._holding._parts.get(request.key)  # noqa: SLF001 - of this module
        if part is None or part.publisher is not self or part.complete:
            raise ProtocolError(f"The part {request.key} of weights was not reserved.")
        if request.data_bytes + request.index_bytes > part.buffer.size:
            raise ProtocolError(f"The part {request.key} of weights exceeds its memory.")
        part.held = Held(
            part.buffer.number,
            part.buffer.size,
            request.data_bytes,
            request.index_bytes,
            request.index_sum,
        )
        part.complete = True
        return part.held

    def _read(self, request: ReadPart) -> tuple[Held, int, memoryview]:
        if request.key not in self._open:
            raise ProtocolError(f"The part {request.key} of weights is not open.")
        part = self._holding.part(request.key)
        nbytes = min(request.nbytes, MAX_READ)
        data = os.pread(part.buffer.fd, nbytes, request.offset)
        return part.held, -1, memoryview(data)

    def _close(self, key: str, *, forked: bool) -> Held:
        if key not in self._open:
            raise ProtocolError(f"The part {key} of weights is not open.")
        held = self._holding.part(key).held
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]
        self._holding.closed(key, shared=forked)
        return held

    def end(self) -> None:
        """Release what the connection had; its process may live, and read on."""
        for key, count in self._open.items():
            for _ in range(count):
                self._holding.closed(key, shared=True)
        self._open.clear()
        self._holding.left(self)
