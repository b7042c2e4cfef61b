"""Servers of embedding tables in threads, over real sockets, with a dict for each table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from dlrover.checkpoint.storage.stores import open_store
from dlrover.embedding.machine.placement import Placement
from dlrover.embedding.remote import stored
from dlrover.embedding.remote.client import ServerGroup
from dlrover.embedding.remote.holding import Holding
from dlrover.embedding.remote.server import EmbeddingServer
from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.spec.placement import LookPlacement, PlacementReply, PlacementRequest

DIM = 4


def slots_of(keys):
    return ((keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(54)).astype(
        np.intp
    )


class PlainTable:
    """A dict of rows; an update subtracts the gradient, and removes the row if all of it is 100."""

    dim = DIM

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}
        self._changed: set[int] = set()
        self._lock = threading.Lock()

    def lookup(self, keys):
        with self._lock:
            self._changed |= set(keys.tolist()) - self._rows.keys()
            return np.array([self._rows.setdefault(key, first(key)) for key in keys.tolist()])

    def peek(self, keys):
        with self._lock:
            return np.array(
                [self._rows.get(key, np.zeros(DIM)) for key in keys.tolist()], np.float32
            )

    def update(self, keys, gradients):
        with self._lock:
            for key, gradient in zip(keys.tolist(), gradients, strict=True):
                self._changed.add(key)
                if (gradient == 100).all():
                    self._rows.pop(key, None)
                else:
                    self._rows[key] = self._rows[key] - gradient

    def export_rows(self, slots, *, changed):
        with self._lock:
            keys = np.array([*(self._changed if changed else self._rows)], np.int64)
            keys = keys[np.isin(slots_of(keys), slots)]
            self._changed -= set(keys.tolist())
            there = np.array([key in self._rows for key in keys.tolist()], np.bool_)
            rows = [self._rows.get(key, np.zeros(DIM)) for key in keys.tolist()]
            return {
                "keys": keys,
                "there": there,
                "values": np.array(rows, np.float32).reshape(-1, DIM),
            }

    def restore_rows(self, rows, *, changed):
        with self._lock:
            for key, there, value in zip(
                rows["keys"].tolist(), rows["there"], rows["values"], strict=True
            ):
                self._rows.pop(key, None)
                if there:
                    self._rows[key] = value.copy()
                if changed:
                    self._changed.add(key)

    def remove_slots(self, slots):
        with self._lock:
            keys = np.array([*self._rows], np.int64)
            for key in keys[np.isin(slots_of(keys), slots)].tolist():
                del self._rows[key]

    def __len__(self) -> int:
        return len(self._rows)


def first(key: int) -> np.ndarray:
    """A new key's row."""
    return np.full(DIM, key % 7, np.float32)


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


@dataclass
class Cluster:
    """Servers in threads."""

    directory: LocalDirectory = field(default_factory=LocalDirectory)
    servers: dict[int, EmbeddingServer] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    recovered: list[int] = field(default_factory=list)

    def start(self, index: int, start: int = 1, servers: int = 2) -> EmbeddingServer:
        holding = Holding(lambda _options: PlainTable(), slots_of)

        def recover(placement: PlacementReply, slots) -> None:
            self.recovered.append(len(slots))
            if (last := placement.stored) is not None:
                store = open_store(last.place)
                parts = stored.parts(store, stored.read_manifest(store, last.id))
                holding.replay((found for _, found in parts), slots)

        server = EmbeddingServer(index, start, servers, self.directory, holding, recover)
        self.servers[index] = server
        self.threads.append(threading.Thread(target=server.run))
        self.threads[-1].start()
        return server

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
    group = ServerGroup(made.directory, slots_of, timeout=30.0)
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
    table = group.open("users", "{}")
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
