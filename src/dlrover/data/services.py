"""Services that lease shards to a training process: the job's master via the agent, or the process itself."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from dlrover import config, launched
from dlrover.data.machine.datasets import Shards
from dlrover.data.machine.queue import Answer
from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.rpc.relayed import RelayedMaster
from dlrover.spec.node import SERVER
from dlrover.spec.requests import Unanswered, WorkerReply
from dlrover.spec.requests.shards import ShardReply, ShardRequest


class ShardService(Protocol):
    """Service that answers shard requests with a `ShardReply` or `Unanswered`. Calls come from one thread at a time."""

    def ask(self, request: ShardRequest) -> WorkerReply:
        """Return the answer."""

    def another(self) -> ShardService:
        """Return a service for another thread."""

    def close(self) -> None:
        """Release its resources."""


class LocalService:
    """ShardService within this process, for a program that runs alone."""

    def __init__(self) -> None:
        self._shards = Shards()
        self._lock = threading.Lock()

    def ask(self, request: ShardRequest) -> ShardReply | Unanswered:
        """Return the answer."""
        with self._lock:
            try:
                commands = self._shards.handle(request, time.monotonic())
            except (ProtocolError, ConfigurationError) as error:
                return Unanswered(refused=str(error), wrong=isinstance(error, ConfigurationError))
        return next(command.reply for command in commands if isinstance(command, Answer))

    def another(self) -> LocalService:
        """Return this service, which admits one thread at a time."""
        return self

    def close(self) -> None:
        """Do nothing; nothing is open."""


def connect() -> ShardService:
    """Return the service of this process: the job's master by way of its agent, or the process itself.

    Raises:
        ConfigurationError: this is one of several processes, and no master leases samples to them.
    """
    if launched.given.relay:
        return RelayedMaster(launched.given.relay)
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
