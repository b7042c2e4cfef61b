"""Services that lease shards to a training process: the job's master via the agent, or the process itself.

A worker has no connection to the master. Its agent takes its requests on a Unix socket in the abstract
namespace and forwards them. A training process, which forks data loaders and must leave nothing behind,
therefore holds no token, no address and no gRPC.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Protocol

import msgspec

from dlrover import config, launched
from dlrover._util import framing
from dlrover._util.sockets import peer
from dlrover.data.machine.datasets import Shards
from dlrover.data.machine.queue import Answer
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError
from dlrover.spec.node import SERVER
from dlrover.spec.shards import ShardReply, ShardRequest

CALL_TIMEOUT = 30.0
"""Seconds that the agent may take to answer; it reports by itself that the master is away."""
_reply = msgspec.msgpack.Decoder(ShardReply)


class ShardService(Protocol):
    """Service that answers shard requests. Calls come from one thread at a time."""

    def ask(self, request: ShardRequest) -> ShardReply:
        """Return the answer; ``away`` or ``refused`` is set if there is none."""

    def another(self) -> ShardService:
        """Return a service for another thread."""

    def close(self) -> None:
        """Release its resources."""


class LocalService:
    """ShardService within this process, for a program that runs alone."""

    def __init__(self) -> None:
        self._shards = Shards()
        self._lock = threading.Lock()

    def ask(self, request: ShardRequest) -> ShardReply:
        """Return the answer."""
        with self._lock:
            try:
                commands = self._shards.handle(request, time.monotonic())
            except ProtocolError as error:
                return ShardReply(refused=str(error))
        return next(command.reply for command in commands if isinstance(command, Answer))

    def another(self) -> LocalService:
        """Return this service, which admits one thread at a time."""
        return self

    def close(self) -> None:
        """Do nothing; nothing is open."""


class RelayService:
    """ShardService that forwards requests to the job's master through the agent."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._sock: socket.socket | None = None

    def ask(self, request: ShardRequest) -> ShardReply:
        """Return the answer."""
        data = msgspec.msgpack.encode(request)
        if len(data) > framing.MAX_FRAME:
            return ShardReply(
                refused=f"A request has {len(data)} bytes; {framing.MAX_FRAME} are accepted."
            )
        try:
            return self._asked(data)
        except (OSError, InfrastructureError, framing.FrameTooLongError) as error:
            self.close()
            return ShardReply(away=f"The agent of this node does not answer: {error}.")
        except msgspec.DecodeError as error:
            self.close()
            return ShardReply(refused=f"The agent's answer cannot be read: {error}.")

    def _asked(self, data: bytes) -> ShardReply:
        if self._sock is None:
            self._sock = _connected(self._address)
        self._sock.sendall(framing.pack(data))
        return _reply.decode(framing.receive(self._sock.recv_into))

    def another(self) -> RelayService:
        """Return a service with a connection of its own."""
        return RelayService(self._address)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.close()
            self._sock = None


def connect() -> ShardService:
    """Return the service of this process.

    Raises:
        ConfigurationError: this is one of several processes, and no master leases samples to them.
    """
    if launched.given.relay:
        return RelayService(launched.given.relay)
    count = world()[1]
    if count > 1:
        raise ConfigurationError(
            f"WORLD_SIZE is {count}, and no DLRover master leases data to these processes; start them with"
            " dlrover-run."
        )
    return LocalService()


def world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, without parameter servers, which read no data."""
    env = config.environ()
    size = env.get("ROLE_WORLD_SIZE") or env.get("WORLD_SIZE") or 1
    return int(env.get("ROLE_RANK") or env.get("RANK") or 0), int(size)


def serves() -> bool:
    """Return whether this process is a parameter server, which reads no data."""
    env = config.environ()
    all_alike = env.get("ROLE_WORLD_SIZE") == env.get("WORLD_SIZE")
    return env.get("ROLE_NAME") == SERVER and not all_alike


def _connected(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CALL_TIMEOUT)
        sock.connect(f"\0{address}")
    except BaseException:
        sock.close()
        raise
    if peer(sock).uid != os.getuid():
        sock.close()
        raise InfrastructureError("another user has the socket of the agent")
    return sock
