"""Process groups that can be abandoned: one per membership, outside of torch's default group.

A collective that waits for a dead peer must be left. gloo has no way to do that: tried with a stopped peer, ``abort`` and
``shutdown`` (torch 2.13, 2.15) return and the collective waits on; so does ``reconfigure`` (experimental, 2.15), though the
group then works among those that are left, as a new one does. So the group's own connections are shut down: those sockets
that its creation has opened, and only connected ones (a listener that is shut down ends the process). NCCL's group has
``abort``. Rarely, gloo does not notice: about one in some hundred collectives whose peers are gone waits on for ever (torch
2.13). Such a one is left to its thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from dlrover._util import sockets
from dlrover.errors import InfrastructureError
from dlrover.spec.requests.membership import MAX_VALUE, Meet, Members, Met, checksum
from dlrover.training.replicas.link import Link

TIMEOUT = timedelta(minutes=30)
"""Time limit of a collective; a lost peer is known long before."""
PATIENCE = 5
"""Times its time limit that gloo waits for a connection."""
CONNECT_TIMEOUT = timedelta(seconds=2) / PATIENCE
"""Time limit for the connection to a peer, which may be lost meanwhile: the others wait as long."""
POLL = 0.002, 0.02
"""Seconds between two looks for a peer's key: at first, and at most."""
KEEP = 0.1, 60.0
"""Seconds between two looks whether another master has taken over: at first, and at most."""
LOOK = timedelta(seconds=0.05)
"""Time between two looks whether a collective is to end, and for which one that is to end may still do so."""
_forming = threading.Lock()


class Descriptor(NamedTuple):
    """An open socket; its number may be given to another file later."""

    number: int
    what: str
    """Its target in ``/proc``, which names its inode."""


class Changed(Exception):  # noqa: N818 - control flow: the membership is over
    """The membership that a group belongs to is over, or one of its ranks is gone."""


class MeetingStore(dist.Store):  # type: ignore[misc]
    """torch's store for one membership, in the memory of the job's master: no rank holds it. Each key is set once."""

    def __init__(
        self,
        link: Link,
        round_: int,
        number: int,
        attempts: dict[int, int],
        row: int = -1,
        *,
        begun: bool = False,
    ) -> None:
        """Let the ranks of a membership meet, those of a ``row`` in their attempt ``number``, or all of a round that has ``begun``."""
        super().__init__()
        self._link, self._row = link, row
        self._begun = begun
        self._of = round_, number, checksum(attempts) if row < 0 and not begun else 0
        self.look: Callable[[], None] = lambda: None
        """Called while keys are awaited; an error ends the wait."""
        self.refused = False
        """True once the master has said that the membership is over."""
        self._own: dict[str, bytes] = {}
        self._known: dict[str, bytes] = {}
        self._read = 0
        """Number of keys that were read from the master of this epoch."""
        self._epoch = 0
        self._asking = threading.RLock()
        self._pause = threading.Event()  # never set

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        data = bytes(value, "utf-8") if isinstance(value, str) else bytes(value)
        assert len(data) <= MAX_VALUE
        with self._asking:
            self._own[key] = data
            self._ask({key: data})

    def get(self, key: str) -> bytes:
        """Return a key's value, once it is set."""
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], _timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        delay, most = POLL
        while not self._known.keys() >= set(keys):
            if not self._ask({}):
                self.look()
                self._pause.wait(delay)
                delay = min(most, 1.5 * delay)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Set the own keys again if another master takes over, while others may not have read them.

        A rank that has read all that it needs asks for nothing more, and the others would wait for its keys for ever.
        """
        ended = threading.Event()
        threading.Thread(target=self._keep, args=(ended,), name="keys", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _keep(self, ended: threading.Event) -> None:
        delay, most = KEEP
        while not ended.wait(delay):
            delay = min(most, 1.5 * delay)
            try:
                self._ask({})
            except (Changed, InfrastructureError):
                return

    def _ask(self, put: dict[str, bytes]) -> bool:
        """Set keys; return whether there are new ones."""
        with self._asking:
            return self._asked(put)

    def _asked(self, put: dict[str, bytes]) -> bool:
        reply = self._link.ask(Meet(*self._of, put, self._read, self._row, self._begun))
        assert isinstance(reply, Met)
        if reply.refused:
            self.refused = True
            raise Changed(reply.refused)
        if reply.epoch != self._epoch:
            first, self._epoch, self._read = not self._epoch, reply.epoch, 0
            if not first:  # a new master has none of the keys
                return self._asked(self._own)
        self._read += len(reply.values)
        self._known |= reply.values
        return bool(reply.values)


class CompletedWork(dist._Work):  # type: ignore[misc] # noqa: SLF001 - the only base in Python
    """An operation that is complete."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, _timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> Any:
        """Return a future that is complete."""
        return self._future


class Group(dist.ProcessGroup):  # type: ignore[misc]
    """torch's process group, made in Python."""

    _name = ""

    @property
    def group_name(self) -> str:
        """The name that torch has given the group, which the base class keeps for its backends only."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Gather tensors of each rank."""
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return done(outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # its name since torch 2.13


class _Barrier(Group):
    """A group that C++ asks for operations."""

    def barrier(self, opts: Any = None) -> CompletedWork:
        """Return an operation that is complete."""
        return CompletedWork([])


@functools.cache
def _lasts() -> bool:
    """Return whether an operation made in Python outlives its object there, once C++ has it; not in torch 2.6."""
    try:
        dist.ProcessGroup.barrier(_Barrier(0, 1)).get_future()
    except RuntimeError:
        return False
    return True


def done(tensors: list[torch.Tensor]) -> Any:
    """Return an operation that is complete, for Python and for C++."""
    own = CompletedWork(tensors)
    if _lasts():
        return own
    return _distributed_c10d._create_work_from_future(own.get_future())  # noqa: SLF001 - its own kind


class Peers:
    """Ranks that are connected; a rank alone has no connections."""

    def __init__(
        self,
        ranks: list[int],
        rank: int,
        failed: Callable[[], None],
        abandoned: Callable[[], bool],
    ) -> None:
        """``failed`` is called when a collective has failed; ``abandoned`` says whether they all are to end."""
        self.ranks = ranks
        self.place = ranks.index(rank)
        self._failed, self._abandoned = failed, abandoned
        self._backend: Any = None

    def _connect(self, store: dist.Store) -> None:
        if len(self.ranks) > 1:
            self._backend = dist.ProcessGroupGloo(
                store, self.place, len(self.ranks), CONNECT_TIMEOUT
            )
            self._backend._set_default_timeout(TIMEOUT)  # noqa: SLF001

    # ---- collectives

    def sum(self, tensors: list[torch.Tensor]) -> None:
        """Add up tensors of all ranks, in place."""
        if self._backend is None:
            return
        self._wait([self._backend.allreduce([tensor]) for tensor in tensors])

    def reduce(self, tensors: list[torch.Tensor], reduction: Any) -> None:
        """Reduce tensors of all ranks, in place."""
        if self._backend is None:
            return
        options = dist.AllreduceOptions()
        average = reduction == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if average else reduction
        self._wait([self._backend.allreduce([tensor], options) for tensor in tensors])
        for tensor in tensors if average else ():
            tensor.copy_(tensor / len(self.ranks))  # integers, too, as Lightning has them

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor of each rank, in the order of ``ranks``."""
        if self._backend is None:
            return [tensor.clone()]
        found = [torch.empty_like(tensor) for _ in self.ranks]
        self._wait([self._backend.allgather([found], [tensor])])
        return found

    def send_all(self, tensors: list[torch.Tensor], source: int) -> None:
        """Give all ranks the tensors of the rank ``source``, in place."""
        if self._backend is None:
            return
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks.index(source)
        self._wait([self._backend.broadcast([tensor], options) for tensor in tensors])

    def give(self, data: torch.Tensor, source: int, to: list[int]) -> None:
        """Send the bytes of the rank ``source`` to the ranks ``to``, in place, and nothing to the others.

        All ranks call this, the others with an empty tensor: a broadcast would send them all of it.
        """
        if self._backend is None:
            return
        own, empty, size = self.ranks[self.place], data.new_empty(0), data.numel()
        gives, takes = own == source, own in to
        sends = data.repeat(len(to)) if gives else empty
        sent = [size if gives and rank in to else 0 for rank in self.ranks]
        received = [size if takes and rank == source else 0 for rank in self.ranks]
        output = data if takes else empty
        self._wait([self._backend.alltoall_base(output, sends, received, sent)])

    def _wait(self, works: list[Any]) -> None:
        failures = []
        for work in works:  # all of them end
            if (error := self._failure(work)) is not None:
                failures.append(error)
                self._failed()
        if failures:
            raise Changed(failures[0])

    def _failure(self, work: Any) -> str | None:
        """Wait for an operation; return the text of its error, also if it is to end and does not.

        The error itself would refer to this frame, and the frame to the operation: the group's threads and connections
        would stay until Python's next full collection.
        """
        abandoned = self._abandoned()
        while not work.is_completed():
            try:
                work.wait(LOOK)
            except RuntimeError as error:
                if abandoned and not work.is_completed():
                    # The end of the group would wait for the operation's thread: it never comes.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))
                    return str(error)
            abandoned = self._abandoned()
        try:
            work.wait()
        except RuntimeError as error:
            return str(error)
        return None


class MembershipGroup(Peers):
    """The process groups of one membership: of all its ranks, and of those with the same place in their rows."""

    def __init__(self, link: Link, round_: int, members: Members, rank: int) -> None:
        """Connect to the other ranks.

        Raises:
            Changed: The membership is over.
        """
        self.attempts = dict(sorted(members.attempts.items()))
        self._over = False
        super().__init__(list(self.attempts), rank, self.abandon, lambda: self._over)
        self.number, self.row = members.number, members.row
        column = [r for r in self.ranks if r % self.row == rank % self.row]
        self.column: Peers = (
            self if self.row == 1 else Peers(column, rank, self.abandon, lambda: self._over)
        )
        """The ranks with the same place in their rows; with rows of one rank, all."""
        self._sockets: list[socket.socket] = []
        if len(self.ranks) > 1:
            self._meet(MeetingStore(link, round_, self.number, self.attempts))

    def _meet(self, store: MeetingStore) -> None:
        with _forming:  # the sockets of one group at a time are new
            before = _descriptors()
            try:
                self._connect(store)
                if self.column is not self:
                    place = self.column.ranks[0] % self.row
                    self.column._connect(dist.PrefixStore(f"column {place}", store))  # noqa: SLF001
            except (RuntimeError, Changed) as error:
                # Those that are connected would wait for this rank in the group, for as long as it holds its side.
                self._sockets = _connected(_descriptors() - before)
                self.close()
                raise Changed(str(error)) from error
            self._sockets = _connected(_descriptors() - before)

    def abandon(self) -> None:
        """End all collectives with an error, also one that another thread waits in."""
        self._over = True
        for sock in self._sockets:
            sockets.shut_down(sock)

    def close(self) -> None:
        """Abandon the groups and free their connections."""
        self.abandon()
        for sock in self._sockets:
            sock.close()
        self._sockets = []
        self._backend = self.column._backend = None  # noqa: SLF001


def connections() -> set[Descriptor]:
    """Return the descriptors of this process's connected TCP sockets."""
    found = set()
    for descriptor in _descriptors():
        if (copy := _connection(descriptor)) is not None:
            found.add(descriptor)
            copy.close()
    return found


def shut_down(descriptors: set[Descriptor]) -> None:
    """End the connections of descriptors, so that collectives that wait for them fail."""
    for sock in _connected(descriptors):
        sockets.end(sock)


def _descriptors() -> set[Descriptor]:
    """Return this process's open sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add(Descriptor(int(name), target))
    return found


def _connected(descriptors: set[Descriptor]) -> list[socket.socket]:
    """Return copies of the connected TCP sockets among ``descriptors``."""
    copies = map(_connection, descriptors)
    return [copy for copy in copies if copy is not None]


def _connection(descriptor: Descriptor) -> socket.socket | None:
    """Return a copy of a connected TCP socket; None for another file, or one that is closed by now."""
    try:
        copy = os.dup(descriptor.number)
    except OSError:
        return None
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # its number belongs to another file by now
        os.close(copy)
        return None
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # a listener
            sock.getpeername()
            return sock
    sock.close()
    return None
