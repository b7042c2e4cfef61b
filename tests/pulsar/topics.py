"""Topics of the stand-in for a Pulsar: ledgers of entries, cursors, and a file that keeps them.

What is done was looked up in Pulsar's sources (PersistentTopic, ManagedLedgerImpl, ManagedCursorImpl,
NonDurableCursorImpl).
"""

from __future__ import annotations

import base64
import bisect
import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.pulsar.wire import Fields

if TYPE_CHECKING:
    from tests.pulsar.broker import Consumer

CHECKSUM = b"\x0e\x01"
Position = tuple[int, int]
"""A ledger and an entry of it."""
EARLIEST = (-1, -1)


class Entry:
    """What one SEND has brought: a message, or a batch of them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        at = 6 if data[:2] == CHECKSUM else 0
        (size,) = struct.unpack_from(">I", data, at)
        metadata = Fields(data[at + 4 : at + 4 + size])
        self.published = metadata.number(3)
        self.is_batch = metadata.has(11)
        self.count = metadata.number(11, 1)


class Cursor:
    """How far a subscription is. All up to ``mark`` is acknowledged; ``read`` comes next."""

    def __init__(self, mark: Position, read: Position, *, durable: bool) -> None:
        self.mark, self.read, self.durable = mark, read, durable
        self.acked: set[Position] = set()
        self.consumer: Consumer | None = None
        self.resetting = False


class Topic:
    """Ledgers of entries. Only whole ledgers are trimmed, and never the current one."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.entries_in_ledger = options.get("entries", 1 << 30)
        self.retained = options.get("retained", True)
        self.ledgers: dict[int, list[Entry]] = {}
        self.cursors: dict[str, Cursor] = {}
        self.last: Position = EARLIEST

    @property
    def partition(self) -> int:
        """The partition that it is; -1: it is none."""
        _, found, number = self.name.rpartition("-partition-")
        return int(number) if found else -1

    def next_valid(self, position: Position) -> Position:
        """ManagedLedgerImpl.getNextValidPosition: the next entry that is kept, or where the next one will be."""
        ledger, entry = position[0], position[1] + 1
        if entry < len(self.ledgers.get(ledger, ())):
            return ledger, entry
        for later in sorted(self.ledgers):
            if later > ledger and self.ledgers[later]:
                return later, 0
        current = max(self.ledgers)
        return (current, len(self.ledgers[current]))

    def previous(self, position: Position) -> Position:
        """ManagedLedgerImpl.getPreviousPosition."""
        if position[1] > 0:
            return position[0], position[1] - 1
        for earlier in sorted(self.ledgers, reverse=True):
            if earlier < position[0] and self.ledgers[earlier]:
                return earlier, len(self.ledgers[earlier]) - 1
        return position[0], -1

    def at(self, position: Position) -> tuple[Position, Entry] | None:
        """The first entry from a position on; a ledger that is not there any more is passed over."""
        ledger, entry = self.next_valid((position[0], position[1] - 1))
        entries = self.ledgers[ledger]
        return ((ledger, entry), entries[entry]) if entry < len(entries) else None

    def non_durable(self, start: Position | None) -> Cursor:
        """NonDurableCursorImpl: behind the last entry is the end, a negative ledger the beginning."""
        if start is None or start > self.last:
            read = self.next_valid(self.last)
        elif start[0] < 0:
            read = self.next_valid(EARLIEST)
        else:
            read = self.next_valid(start)
        return Cursor(self.previous(read), read, durable=False)

    def durable(self, *, earliest: bool) -> Cursor:
        read = self.next_valid(EARLIEST if earliest else self.last)
        return Cursor(self.previous(read), read, durable=True)

    def reset(self, cursor: Cursor, position: Position) -> None:
        """ManagedCursorImpl.asyncResetCursor: a position that is not there becomes the next one that is."""
        cursor.read = self.next_valid((position[0], position[1] - 1))
        cursor.mark, cursor.acked = self.previous(cursor.read), set()

    def at_time(self, when: int) -> Position:
        """PersistentMessageFinder: behind the newest entry that was published before."""
        entries = list(self.all())
        published = [entry.published for _, entry in entries]
        index = bisect.bisect_left(published, when)
        return entries[index][0] if index < len(entries) else self.next_valid(self.last)

    def all(self) -> Iterator[tuple[Position, Entry]]:
        for ledger in sorted(self.ledgers):
            for number, entry in enumerate(self.ledgers[ledger]):
                yield (ledger, number), entry

    def acknowledge(self, cursor: Cursor, position: Position, *, cumulative: bool) -> None:
        if cumulative:
            cursor.mark = max(cursor.mark, position)
        else:
            cursor.acked.add(position)
        while (following := self.next_valid(cursor.mark)) in cursor.acked:
            cursor.acked.remove(following)
            cursor.mark = following

    def backlog(self, subscription: str) -> int:
        """ManagedCursorImpl.getNumberOfEntriesInBacklog: entries, not messages."""
        mark = self.cursors[subscription].mark
        return sum(position > mark for position, _ in self.all())

    def needed(self) -> int:
        """ManagedLedgerImpl.internalTrimLedgers: the first ledger that has to be kept."""
        current = max(self.ledgers)
        marks = [cursor.mark for cursor in self.cursors.values() if cursor.durable]
        if not marks:
            return current
        ledger, entry = min(marks)
        if ledger != current and entry + 1 == len(self.ledgers.get(ledger, ())):
            return ledger + 1
        return ledger

    def expire(self, count: int) -> int:
        """The first ledger that has to be kept so that the last ``count`` messages are."""
        kept, first = 0, max(self.ledgers)
        for ledger in sorted(self.ledgers, reverse=True):
            if kept >= count and ledger != max(self.ledgers):
                break
            kept += sum(entry.count for entry in self.ledgers[ledger])
            first = ledger
        return first

    def trim(self, first: int) -> None:
        for ledger in [known for known in self.ledgers if known < first]:
            del self.ledgers[ledger]
        for cursor in self.cursors.values():
            if cursor.mark < self.previous(self.next_valid(EARLIEST)):
                cursor.mark = self.previous(self.next_valid(EARLIEST))


class Store:
    """All topics, in memory and in a file, to which each change is appended before it is answered."""

    def __init__(self, path: Path) -> None:
        self.topics: dict[str, Topic] = {}
        self.partitions: dict[str, int] = {}
        self.ledger = 4
        self._replaying = True
        if path.exists():
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # it died while it wrote
                    self.apply(**json.loads(line))
        self._file = path.open("a")
        self._replaying = False
        for name in list(self.topics):  # a broker that takes a topic over begins a ledger
            self.roll(name)

    def apply(self, do: str, **change: Any) -> None:
        """Make a change; in the file unless it comes from there."""
        if not self._replaying:
            self._file.write(json.dumps({"do": do, **change}) + "\n")
            self._file.flush()
        known = {
            "make": self._make, "delete": self._delete, "ledger": self._ledger, "entry": self._entry,
            "trim": self._trim, "cursor": self._cursor, "unsubscribe": self._unsubscribe,
        }  # fmt: skip
        known[do](**change)

    def _make(self, topic: str, partitions: int, options: dict[str, Any]) -> None:
        self.partitions[topic] = partitions
        for name in of_partitions(topic, partitions):
            self.topics.setdefault(name, Topic(name, options))

    def _delete(self, topic: str) -> None:
        for name in of_partitions(topic, self.partitions.pop(topic)):
            del self.topics[name]

    def _ledger(self, topic: str, ledger: int) -> None:
        self.ledger = ledger
        self.topics[topic].ledgers[ledger] = []

    def _entry(self, topic: str, data: str) -> None:
        known = self.topics[topic]
        ledger = max(known.ledgers)
        known.ledgers[ledger].append(Entry(base64.b64decode(data)))
        known.last = ledger, len(known.ledgers[ledger]) - 1

    def _trim(self, topic: str, first: int) -> None:
        self.topics[topic].trim(first)

    def _cursor(self, topic: str, name: str, mark: list[int]) -> None:
        known, position = self.topics[topic], (mark[0], mark[1])
        if name not in known.cursors or self._replaying:
            known.cursors[name] = Cursor(position, known.next_valid(position), durable=True)

    def _unsubscribe(self, topic: str, name: str) -> None:
        self.topics[topic].cursors.pop(name, None)

    def make(self, name: str, partitions: int, options: dict[str, Any]) -> None:
        self.apply("make", topic=name, partitions=partitions, options=options)
        for part in of_partitions(name, partitions):
            if not self.topics[part].ledgers:
                self.roll(part)

    def roll(self, name: str) -> None:
        """Begin a ledger. Their ids are the cluster's, so those of a topic have gaps."""
        self.apply("ledger", topic=name, ledger=self.ledger + 3)
        if not self.topics[name].retained:
            self.apply("trim", topic=name, first=self.topics[name].needed())

    def append(self, topic: Topic, data: bytes) -> Position:
        if len(topic.ledgers[max(topic.ledgers)]) >= topic.entries_in_ledger:
            self.roll(topic.name)
        self.apply("entry", topic=topic.name, data=base64.b64encode(data).decode())
        return topic.last

    def moved(self, topic: Topic, name: str, cursor: Cursor) -> None:
        """Keep where a durable cursor is."""
        if cursor.durable:
            self.apply("cursor", topic=topic.name, name=name, mark=cursor.mark)


def of_partitions(name: str, count: int) -> list[str]:
    return [f"{name}-partition-{number}" for number in range(count)] if count else [name]
