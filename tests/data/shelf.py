"""A broker in memory, and streams of it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import pytest

from dlrover.data import client, feed, streamed
from dlrover.data.machine.spans import Spans
from dlrover.data.records import Records
from dlrover.data.sources.stream import Address, Bounds, Broker, Fetched, Message, Stream
from dlrover.errors import ConfigurationError
from dlrover.spec.requests.shards import Span


class Shelf:
    """Partitions in memory, whose offsets have gaps. What is below ``removed`` was removed."""

    def __init__(self, partitions: int = 1, gap: int = 1) -> None:
        self.gap = gap
        self.offsets: list[list[int]] = [[] for _ in range(partitions)]
        self.removed = [0] * partitions
        self.times: list[list[float]] = [[] for _ in range(partitions)]
        self.away = 0
        self.sent: list[tuple[int, int]] = []
        self.asked: list[int] = []
        """How many messages each fetch has asked for."""
        self.size = 0
        """Bytes of a message; 0: it is its place."""
        self.most = 1 << 30
        """Messages in a request from which on it breaks off."""
        self.committed: list[list[int]] = []
        self.tells_gaps = False
        """Whether a fetch says how far there is nothing behind what was asked for."""
        self.refuses = ""
        """Why it takes no commits."""
        self.source_ids: dict[str, str] = {}

    def send(self, count: int, partition: int = 0, at: float = 0.0) -> None:
        for _ in range(count):
            offsets = self.offsets[partition]
            offsets.append(offsets[-1] + 1 + len(offsets) % self.gap if offsets else 0)
            self.times[partition].append(at)
            self.sent.append((partition, offsets[-1]))

    def add_partition(self) -> None:
        self.offsets.append([])
        self.times.append([])
        self.removed.append(0)


class Memory(Broker):
    def __init__(self, address: Address, shelf: Shelf) -> None:
        super().__init__(address)
        self.shelf = shelf
        self.group = address.group
        self.transient = (OSError,)
        self.sparse = shelf.gap > 1

    @property
    def identity(self) -> str:
        return "memory"

    def bounds(self) -> list[Bounds]:
        if self.shelf.away:
            self.shelf.away -= 1
            raise OSError(f"no way to {self.address.password}")
        self.source_ids = dict(self.shelf.source_ids)
        return [
            Bounds(max(gone, offsets[0] if offsets else 0), offsets[-1] + 1 if offsets else 0)
            for offsets, gone in zip(self.shelf.offsets, self.shelf.removed, strict=True)
        ]

    def fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        assert start < stop <= self.bounds()[partition].end, "there is nothing to ask for"
        self.shelf.asked.append(most)
        if most >= self.shelf.most:
            raise OSError("the connection is closed")
        removed = self.shelf.removed[partition]
        offsets = self.shelf.offsets[partition]
        at = bisect_left(offsets, max(start, removed))
        found = [offset for offset in offsets[at : at + most] if offset < stop]
        messages = [Message(partition, offset, self._value(partition, offset)) for offset in found]
        reached = stop if len(found) < most else found[-1] + 1
        if self.shelf.tells_gaps and reached == stop:
            reached = next((offset for offset in offsets[at:] if offset >= stop), stop)
        return Fetched(messages, reached, max(start, removed))

    def _value(self, partition: int, offset: int) -> object:
        return bytes(self.shelf.size) if self.shelf.size else (partition, offset)

    def offsets_at(self, when: datetime, bounds: list[Bounds]) -> list[int]:
        return [
            next((o for o, at in zip(*known, strict=True) if at >= when.timestamp()), end)
            for *known, (_, end) in zip(self.shelf.offsets, self.shelf.times, bounds, strict=True)
        ]

    def commit(self, offsets: list[int]) -> None:
        if self.shelf.refuses:
            raise ConfigurationError(self.shelf.refuses)
        self.shelf.committed.append(offsets)

    def close(self) -> None:
        pass


class MemoryStream(Stream):
    def __init__(self, shelf: Shelf, query: str = "", **options) -> None:
        super().__init__(f"memory://user:secret@host/topic{query}", **options)
        self.shelf = shelf

    def broker(self) -> Broker:
        return Memory(Address(self._url), self.shelf)


def without(state: dict, *spans: Span) -> dict:
    """A worker's state, as if it had not come to these samples."""
    mine = Spans.unpacked(state["acknowledged"])
    for span in spans:
        mine.remove(span)
    return {**state, "acknowledged": mine.packed()}


@contextmanager
def quick() -> Iterator[pytest.MonkeyPatch]:
    """Short pauses; no thread stays."""
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "ENDS_INTERVAL", 0.01)
        patch.setattr(feed, "RETRY", (0.01, 0.01))
        patch.setattr(client, "POLL", 0.01)
        patch.setattr(client, "REPORT_INTERVAL", 0.02)
        patch.setattr(feed, "CHUNK", 7)
        yield patch
    for thread in set(threading.enumerate()) - before:
        assert not thread.name.startswith("dlrover-")


@pytest.fixture
def fast_and_clean() -> Iterator[None]:
    """Short pauses; no thread stays."""
    with quick():
        yield


@pytest.fixture
def read(fast_and_clean) -> Iterator:
    """Makes data sets of a shelf and closes them."""
    made = []

    def make(
        shelf: Shelf, query: str = "", *, shard: int | None = None, attempts: int = 3, **options
    ) -> Records:
        stream = MemoryStream(shelf, query, **options)
        made.append(Records(stream, shard=shard, attempts=attempts))
        return made[-1]

    yield make
    for data in made:
        data.close()
