"""A worker's side of its node's saver: the connection, its requests, and the memory of the generations."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from typing import TypeVar

import torch

from dlrover._util import start
from dlrover.checkpoint.engine.buffers import pin
from dlrover.checkpoint.machine import policies
from dlrover.checkpoint.machine.layout import PackedLayout
from dlrover.checkpoint.machine.policies import Policy
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import memory, protocol
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.saver.protocol import SaverGoneError
from dlrover.checkpoint.storage.lease import job_of
from dlrover.checkpoint.storage.stores import Store, reason
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError, ProtocolError

logger = logging.getLogger(__name__)

START_ATTEMPTS = 5
"""Attempts to start a saver: one that is shutting down may hold the address without serving."""
START_TIMEOUT = 60.0
"""Seconds that a saver may take to start."""

_Reply = TypeVar("_Reply", bound=protocol.SaverMessage)


class SaverClient:
    """The connection of one rank, with one request at a time. Any thread may call its methods."""

    def __init__(
        self,
        store: Store,
        identity: str,
        *,
        node: str = "",
        keep: Policy,
        linger: float,
        env: Mapping[str, str],
    ) -> None:
        self._store = store
        self._address = protocol.address(store.location, identity, node)
        self._env = dict(env)
        self._command = [
            *start.command("dlrover.checkpoint.saver.saver"),
            "--directory", store.location, "--identity", identity, "--node", node,
            "--keep", policies.encode(keep), "--linger", str(linger),
        ]  # fmt: skip
        self._job = job_of(env)
        self._rank = -1
        self._lock = threading.Lock()
        self._sock = protocol.new_socket()
        self._fds: list[int] = []
        self._generations: list[Generation] = []
        self._interrupted: protocol.SaverMessage | None = None
        """Request that a signal has interrupted, as Ctrl-C does: its reply may still come."""
        self._late: tuple[str, ...] = ()
        """Failures in the reply to an interrupted `wait`."""

    def attach(self, rank: int) -> protocol.Attached:
        """Connect, start the saver if there is none, and return the saver's reply.

        Raises:
            InfrastructureError: the saver cannot be started, or refuses.
        """
        with self._lock:
            self._rank = rank
            try:
                return self._attach(rank)
            except BaseException:
                self._close()  # so that the next request finds no saver, whatever has interrupted this one
                raise

    def _attach(self, rank: int) -> protocol.Attached:
        for _ in range(START_ATTEMPTS):
            reply = self._try_to_attach(rank)
            if reply is not None:
                break
            self._start()
        else:
            raise InfrastructureError(
                "The checkpoint saver of this node does not start; see"
                f" {protocol.log_file(self._store.location)}."
            )
        fds = self._fds
        attached = _expected(reply, protocol.Attached)
        if not 1 <= len(fds) <= protocol.GENERATIONS:
            raise ProtocolError(f"The saver sent {len(fds)} descriptors of memory.")
        self._generations = [Generation(fd) for fd in fds]
        return attached

    def _try_to_attach(self, rank: int) -> protocol.Reply | None:
        """Attach to a running saver; return None if there is none, or it is shutting down."""
        self._close()
        self._sock, self._interrupted = protocol.new_socket(), None
        try:
            self._sock.connect(self._address)
            saver = protocol.check_peer(self._sock)
            if saver:
                # A stopped saver would not answer. The process may also be its starter, which may be gone.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(saver, signal.SIGCONT)
            protocol.send(self._sock, protocol.Attach(rank, self._job))
            reply, self._fds = protocol.receive_reply(self._sock)
        except (ConnectionError, SaverGoneError):
            return None
        return reply

    def _start(self) -> None:
        starting = subprocess.run(
            self._command,
            env=self._env,
            cwd="/",
            input=self._store.url.encode() if self._store.url != self._store.location else b"",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            timeout=START_TIMEOUT,
            check=False,
        )
        if starting.returncode:
            raise InfrastructureError(
                f"The checkpoint saver does not start: {starting.stderr.decode(errors='replace')[-500:]}"
            )

    def generation(self, slot: int) -> Generation:
        """Return a generation, with all the memory that it has by now."""
        if os.fstat(self._fds[slot]).st_size != self._generations[slot].size:
            self._generations[slot] = Generation(self._fds[slot])
        return self._generations[slot]

    def join(self, world: protocol.JoinSaver) -> None:
        """Tell the saver which world this rank belongs to."""
        self._ask(world, protocol.CarriedOut)

    def listen(self, host: str, *, tls: bool) -> protocol.Listening:
        """Make the saver accept replicas at an address of this node."""
        return self._ask(protocol.Listen(host, 0, tls), protocol.Listening)

    def look(self) -> protocol.ValidGenerations:
        """Return the valid generations on this node, of all ranks."""
        return self._ask(protocol.Look(), protocol.ValidGenerations)

    def open(self, rank: int) -> list[Generation]:
        """Return the generations of any rank on this node, for reading."""
        _, fds = self._request(protocol.Open(rank), protocol.Attached)
        try:
            return [Generation(fd) for fd in fds]
        finally:
            for fd in fds:
                os.close(fd)

    @property
    def generations(self) -> list[Generation]:
        """All generations of this rank; fewer than usual if memory was short."""
        return [self.generation(slot) for slot in range(len(self._fds))]

    def reserve(self, slot: int, nbytes: int) -> str:
        """Have memory provided for a generation; if memory is short, the last generations are dropped.

        Return why there is no memory for even one, or an empty text. Other requests do not wait for this.
        """
        request = protocol.Reserve(self._rank, slot, nbytes)
        with contextlib.closing(protocol.new_socket()) as sock:
            reserved = _expected(_exchange(sock, request, self._address)[0], protocol.Reserved)
        while len(self._fds) > max(1, reserved.generations):
            os.close(self._fds.pop())
            self._generations.pop()
        return reserved.problem

    def begin(self, save: SaveId, ready: int = protocol.GENERATIONS) -> int:
        """Return the generation to write, below ``ready``; ``ready`` itself if that one must be awaited.

        Log a pending message about the storage.
        """
        granted = self._ask(protocol.Begin(save, ready), protocol.Granted)
        if granted.news:
            logger.warning("%s", granted.news)
        return granted.slot

    def commit(
        self, slot: int, save: SaveId, *, to_storage: bool, metrics: dict[str, float]
    ) -> None:
        """Tell the saver that a generation is valid."""
        self._ask(protocol.Commit(slot, save, to_storage, metrics), protocol.CarriedOut)

    def pass_over(self, save: SaveId, *, written: bool = False) -> None:
        """Tell the saver not to expect this rank's part of a save; ``written``: this process stores it."""
        self._ask(protocol.PassOver(save, written), protocol.CarriedOut)

    def keep(self, save: SaveId | None) -> None:
        """Tell the saver which save the training continues from; None: none in memory."""
        self._ask(protocol.Keep(save), protocol.CarriedOut)

    def verify(self, rank: int, slot: int) -> str:
        """Return what is wrong with a generation, or an empty text."""
        return self._ask(protocol.Verify(rank, slot), protocol.Verified).problem

    def wait(self) -> tuple[str, ...]:
        """Wait until everything requested is durable or has failed; return the failures."""
        problems = self._ask(protocol.Wait(), protocol.Settled).problems
        late, self._late = self._late, ()
        return late + problems

    def stored(self) -> SaveId | None:
        """Return the newest stored save of this rank's world."""
        return self._ask(protocol.Stored(), protocol.NewestStored).save

    def close(self) -> None:
        """Say goodbye and disconnect."""
        with self._lock:
            with contextlib.suppress(OSError):  # the saver is gone, or never ran
                protocol.send(self._sock, protocol.Goodbye())
            self._close()

    def _close(self) -> None:
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds, self._generations = [], []

    def _ask(self, request: protocol.SaverMessage, kind: type[_Reply]) -> _Reply:
        return self._request(request, kind)[0]

    def _request(
        self, request: protocol.SaverMessage, kind: type[_Reply]
    ) -> tuple[_Reply, list[int]]:
        with self._lock:
            if self._interrupted is not None:
                self._catch_up(self._interrupted)
            self._interrupted = request
            reply, fds = _exchange(self._sock, request)
            self._interrupted = None
        return _expected(reply, kind), fds

    def _catch_up(self, interrupted: protocol.SaverMessage) -> None:
        """Pass the reply to an interrupted request, which may have come, may come, or may never have been asked for.

        The reply to another request follows it, which is of another kind.
        """
        again = isinstance(interrupted, protocol.Look)
        request = protocol.Stored() if again else protocol.Look()
        last = protocol.NewestStored if again else protocol.ValidGenerations
        try:
            reply, fds = _exchange(self._sock, request)
            while not isinstance(reply, last):
                if isinstance(reply, protocol.Settled):
                    self._late += reply.problems
                if isinstance(reply, protocol.Granted) and reply.news:
                    logger.warning("%s", reply.news)
                for fd in fds:
                    os.close(fd)
                reply, fds = protocol.receive_reply(self._sock)
        except BaseException:  # interrupted again: how far it came is unknown
            self._sock.close()
            raise
        self._interrupted = None


def _exchange(
    sock: socket.socket, request: protocol.SaverMessage, connect_to: str = ""
) -> tuple[protocol.Reply, list[int]]:
    try:
        if connect_to:
            sock.connect(connect_to)
            protocol.check_peer(sock)
        protocol.send(sock, request)
        return protocol.receive_reply(sock)
    except OSError as error:
        raise SaverGoneError(f"The checkpoint saver of this node is gone: {error}.") from error


def _expected(reply: protocol.Reply, kind: type[_Reply]) -> _Reply:
    if isinstance(reply, protocol.Refused):
        raise (ConfigurationError if reply.wrong else InfrastructureError)(reply.reason)
    if not isinstance(reply, kind):
        raise ProtocolError(f"The saver answered with {type(reply).__name__}, not {kind.__name__}.")
    return reply


class GenerationPool:
    """The generations of this rank, as its worker sees them.

    A thread has their memory provided one after the other, so a save waits only for the generation that it
    writes to.
    """

    def __init__(self, client: SaverClient) -> None:
        self._client = client
        self._buffers: dict[int, tuple[Generation, torch.Tensor]] = {}
        self._warned: set[str] = set()
        self._changed = threading.Condition()
        self._provider: threading.Thread | None = None
        """Thread that provides memory; None before it starts and after it ends."""
        self._wanted = 0
        """Bytes that each generation should have."""
        self._ready = 0
        """Number of generations that have their memory; the following ones do not have it yet."""
        self._problem = ""
        """Reason why memory does not suffice for even one generation; empty if it does."""
        self._error: DLRoverError | None = None
        """Error of the last request for memory; None if it succeeded."""

    def reserve(self, layout: PackedLayout) -> bool:
        """Wait until a state fits in at least one generation; return False if memory is short.

        The other generations follow in the background.
        """
        with self._changed:
            # Also true if the last call was interrupted.
            idle = self._provider is None and not self._ready
            short = self._wanted < memory.needed_for(layout)
            if self._problem or self._error or idle or short:
                self._provide(memory.capacity_for(layout))
            self._changed.wait_for(lambda: self._ready or self._provider is None)
            problem, error = self._problem, self._error
        if error is not None:
            raise error
        if problem:
            self._warn("none", f"{problem} Only steps for storage are saved, and `save` waits")
        return not problem

    def reserve_ahead(self, layout: PackedLayout, more: int) -> None:
        """Have memory provided in the background, and entered in this process's page tables.

        ``more``: bytes of tensors that the state will gain.
        """
        with self._changed:
            self._provide(memory.capacity_for(layout, more))

    def begin(self, save: SaveId) -> int:
        """Return the generation to write next, once it has its memory.

        Raises:
            DLRoverError: another generation needs memory, and the request for it failed.
        """
        while True:
            with self._changed:
                done = self._provider is None and self._error is None
                ready = len(self._client.generations) if done else self._ready
            slot = self._client.begin(save, ready)
            if slot < ready:
                return slot
            self._wait_for(slot)

    def _wait_for(self, slot: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready > slot or self._provider is None)
            if self._error is not None and self._ready <= slot:
                raise self._error

    def buffer(
        self, slot: int, device: torch.device | None = None
    ) -> tuple[Generation, torch.Tensor]:
        """Return a generation and its data as a tensor; the same ones until the generation is mapped again.

        ``device``: the accelerator that will write to the tensor, if there is one.
        """
        generation = self._client.generation(slot)
        known = self._buffers.get(slot)
        if known is None or known[0] is not generation:
            data = torch.frombuffer(generation.data, dtype=torch.uint8)
            if device is not None:
                pin(generation, data, device)
            known = self._buffers[slot] = generation, data
        return known

    def wait(self) -> None:
        """Wait until no memory is being provided in the background."""
        with self._changed:
            self._changed.wait_for(lambda: self._provider is None)

    def forget(self) -> None:
        """Wait for the background thread and release the memory."""
        self.wait()
        self._buffers.clear()
        self._wanted = self._ready = 0

    # ---- in the background

    def _provide(self, nbytes: int) -> None:
        """Start providing memory, or restart with a larger size. Hold the lock."""
        self._wanted = max(self._wanted, nbytes)
        self._ready, self._problem, self._error = 0, "", None
        if self._provider is None:
            provider = threading.Thread(target=self._run, name="memory")
            provider.start()
            self._provider = provider  # once it runs: a call that waits for it counts on that

    def _run(self) -> None:
        failed = InfrastructureError("No memory is provided any more: its thread has ended.")
        try:
            self._provide_all()
        except OSError as error:
            failed = InfrastructureError(f"Memory cannot be asked for: {reason(error)}.")
        finally:
            with self._changed:
                if self._provider is threading.current_thread():  # the thread failed
                    self._provider, self._error = None, failed
                    self._changed.notify_all()

    def _provide_all(self) -> None:
        while True:
            with self._changed:
                if self._problem or self._error or self._ready >= len(self._client.generations):
                    self._provider = None
                    self._changed.notify_all()
                    break
                slot, nbytes = self._ready, self._wanted
            self._provide_one(slot, nbytes)
        if self._ready == 1:
            self._warn(
                "one",
                "There is memory for one generation only: a process that dies during a save costs the"
                " memory checkpoint",
            )

    def _provide_one(self, slot: int, nbytes: int) -> None:
        problem, failed = "", None
        try:
            problem = self._client.reserve(slot, nbytes)
        except DLRoverError as error:
            failed = error
        generations = self._client.generations
        if not (problem or failed) and slot < len(generations):
            memory.populate(generations[slot], threading.main_thread().is_alive)
        with self._changed:
            if self._wanted == nbytes:  # else more was requested meanwhile
                self._problem, self._error = problem, failed
                self._ready = slot if problem or failed else min(slot + 1, len(generations))
                self._changed.notify_all()

    def _warn(self, subject: str, warning: str) -> None:
        """Log a warning once per subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning("%s", warning)
