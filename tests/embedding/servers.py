"""Servers of embedding tables in threads, over real sockets, as the job's processes run them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from dlrover.checkpoint.storage.stores import open_store
from dlrover.embedding.machine.placement import Placement
from dlrover.embedding.options import Expiry, Initializer, RowOptimizer, TableOptions
from dlrover.embedding.remote import stored
from dlrover.embedding.remote.client import ServerGroup
from dlrover.embedding.remote.holding import HeldSlots
from dlrover.embedding.remote.server import EmbeddingServer
from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.spec.requests.placement import LookPlacement, PlacementReply, PlacementRequest

DIM = 4
OPTIONS = TableOptions(
    dim=DIM,
    optimizer=RowOptimizer(name="sgd", learning_rate=1.0),
    initializer=Initializer("constant", 3.0),
    expiry=Expiry(norm=0.5),
).json()
"""New rows are 3, gradients are subtracted, and rows of zeros expire."""


def first(_key: int) -> np.ndarray:
    """A new key's row."""
    return np.full(DIM, 3, np.float32)


class LocalDirectory:
    """The machine itself, as the master has it."""

    def __init__(self) -> None:
        self.placement = Placement()
        self._lock = threading.Lock()

    def ask(self, request: PlacementRequest) -> PlacementReply:
        with self._lock:
            try:
                reply = self.placement.handle(request)
            except ProtocolError as error:
                raise ConfigurationError(str(error)) from error
            self.placement.validate()
            return replace(reply, secret=b"secret")

    def look(self, known: int) -> PlacementReply:
        return self.ask(LookPlacement(known))


class AwayDirectory:
    """The machine behind a network that may be cut: requests wait meanwhile."""

    def __init__(self, directory: LocalDirectory) -> None:
        self._directory = directory
        self.there = threading.Event()
        self.there.set()

    def ask(self, request: PlacementRequest) -> PlacementReply:
        assert self.there.wait(30)
        return self._directory.ask(request)

    def look(self, known: int) -> PlacementReply:
        return self.ask(LookPlacement(known))


@dataclass
class Cluster:
    """Servers in threads."""

    directory: LocalDirectory = field(default_factory=LocalDirectory)
    servers: dict[int, EmbeddingServer] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    recovered: list[int] = field(default_factory=list)
    networks: dict[int, AwayDirectory] = field(default_factory=dict)
    """How the last start of each server reaches the machine."""

    def start(self, index: int, start: int = 1, servers: int = 2) -> EmbeddingServer:
        holding = HeldSlots()

        def recover(placement: PlacementReply, slots) -> int | None:
            self.recovered.append(len(slots))
            if (last := placement.stored) is None:
                return None
            return stored.restore(
                open_store(last.place),
                last.id,
                lambda found, parts: holding.replay(found, parts, slots),
            )

        network = self.networks[index] = AwayDirectory(self.directory)
        server = EmbeddingServer(index, start, servers, network, holding, recover)
        self.servers[index] = server
        self.threads.append(threading.Thread(target=server.run, daemon=True))
        self.threads[-1].start()
        return server

    def client(self) -> ServerGroup:
        return ServerGroup(self.directory, timeout=30.0)

    def kill(self, index: int) -> None:
        """End a server as SIGKILL does: its connections break, and it tells nobody."""
        self.servers.pop(index).close()

    def settle(self, done: Callable[[Placement], bool]) -> None:
        for _ in range(2000):
            if done(self.directory.placement):
                return
            threading.Event().wait(0.01)
        raise AssertionError(self.directory.placement)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@contextmanager
def cluster(count: int) -> Iterator[tuple[Cluster, ServerGroup]]:
    made = Cluster()
    group = made.client()
    try:
        for index in range(count):
            made.start(index, servers=count)
        yield made, group
    finally:
        group.close()
        made.close()


Model = dict[int, np.ndarray]


def train(group: ServerGroup, model: Model, steps: int, seed: int = 0) -> None:
    """Steps on random keys, each checked against a dict."""
    table = group.open("users", OPTIONS)
    chance = np.random.default_rng(seed)
    for _ in range(steps):
        keys = chance.choice(5000, 300, replace=False).astype(np.int64)
        rows = group.rows(table, DIM, keys, insert=True)
        for key, row in zip(keys.tolist(), rows, strict=True):
            expected = model.setdefault(key, first(key))
            assert (row == expected).all(), key
        gradients = chance.integers(-8, 8, (len(keys), DIM)).astype(np.float32)
        group.push(table, keys, gradients)
        for key, gradient in zip(keys.tolist(), gradients, strict=True):
            model[key] = model[key] - gradient


def expire(group: ServerGroup, model: Model, count: int) -> None:
    """Set the first rows to zero, and evict them."""
    keys = [*model][:count]
    group.push(
        group.open("users", OPTIONS),
        np.array(keys, np.int64),
        np.array([model.pop(key) for key in keys]),
    )
    assert group.evict() >= count
