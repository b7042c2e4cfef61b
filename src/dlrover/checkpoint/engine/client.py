"""A worker's connection to its node's saver: find or start it, get the memory, send requests."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import dlrover
from dlrover.checkpoint.machine import policies
from dlrover.checkpoint.machine.policies import Policy
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import protocol
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.saver.protocol import SaverGoneError
from dlrover.checkpoint.storage.lease import job_of
from dlrover.checkpoint.storage.stores import Store
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError

logger = logging.getLogger(__name__)

START_ATTEMPTS = 5
"""Attempts to start a saver: one that is shutting down may hold the address without serving."""
START_TIMEOUT = 60.0
"""Seconds that a saver may take to start."""

_Reply = TypeVar("_Reply", bound=protocol.Message)


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
        root = str(Path(dlrover.__file__).parent.parent)
        path = [root, env["PYTHONPATH"]] if env.get("PYTHONPATH") else [root]
        self._env = {**env, "PYTHONPATH": os.pathsep.join(path)}
        self._command = [
            sys.executable, "-m", "dlrover.checkpoint.saver.saver",
            "--directory", store.location, "--identity", identity, "--node", node,
            "--keep", policies.encode(keep), "--linger", str(linger),
        ]  # fmt: skip
        self._job = job_of(env)
        self._rank = -1
        self._lock = threading.Lock()
        self._sock = protocol.new_socket()
        self._fds: list[int] = []
        self._generations: list[Generation] = []

    def attach(self, rank: int) -> protocol.Attached:
        """Connect, start the saver if there is none, and return the saver's reply.

        Raises:
            InfrastructureError: the saver cannot be started, or refuses.
        """
        with self._lock:
            self._rank = rank
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
        self._sock = protocol.new_socket()
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

    def join(self, world: protocol.Join) -> None:
        """Tell the saver which world this rank belongs to."""
        self._ask(world, protocol.Done)

    def listen(self, host: str, *, tls: bool) -> protocol.Listening:
        """Make the saver accept replicas at an address of this node."""
        return self._ask(protocol.Listen(host, 0, tls), protocol.Listening)

    def look(self) -> protocol.Holding:
        """Return the valid generations on this node, of all ranks."""
        return self._ask(protocol.Look(), protocol.Holding)

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

    def publish(
        self, slot: int, save: SaveId, *, to_storage: bool, metrics: dict[str, float]
    ) -> None:
        """Tell the saver that a generation is valid."""
        self._ask(protocol.Publish(slot, save, to_storage, metrics), protocol.Done)

    def pass_over(self, save: SaveId, *, written: bool = False) -> None:
        """Tell the saver not to expect this rank's part of a save; ``written``: this process stores it."""
        self._ask(protocol.PassOver(save, written), protocol.Done)

    def keep(self, save: SaveId | None) -> None:
        """Tell the saver which save the training continues from; None: none in memory."""
        self._ask(protocol.Keep(save), protocol.Done)

    def verify(self, rank: int, slot: int, below: int = 0) -> str:
        """Return what is wrong with a generation, or empty; ``below``: check only smaller tensors, 0: all."""
        return self._ask(protocol.Verify(rank, slot, below), protocol.Verified).problem

    def wait(self) -> tuple[str, ...]:
        """Wait until everything requested is durable or has failed; return the failures."""
        return self._ask(protocol.Wait(), protocol.Settled).problems

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

    def _ask(self, request: protocol.Message, kind: type[_Reply]) -> _Reply:
        return self._request(request, kind)[0]

    def _request(self, request: protocol.Message, kind: type[_Reply]) -> tuple[_Reply, list[int]]:
        with self._lock:
            reply, fds = _exchange(self._sock, request)
        return _expected(reply, kind), fds


def _exchange(
    sock: socket.socket, request: protocol.Message, connect_to: str = ""
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
