"""A stand-in for a Pulsar broker, in a process of its own: it speaks Pulsar's binary protocol, and is no real broker.

``python pulsar_broker.py PORT ADMIN_PORT FOLDER [TOKEN]`` keeps its topics in a file of the folder. What it does at
each command was looked up in Pulsar's sources (PulsarApi.proto, ServerCnx, PersistentTopic, ManagedLedgerImpl,
ManagedCursorImpl, NonDurableCursorImpl). Topics are made by `ask`; a topic that nobody has made is not there.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import contextlib
import json
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONNECT, CONNECTED, SUBSCRIBE, PRODUCER, SEND, SEND_RECEIPT = 2, 3, 4, 5, 6, 7
MESSAGE, ACK, FLOW, UNSUBSCRIBE, SUCCESS, ERROR = 9, 10, 11, 12, 13, 14
CLOSE_PRODUCER, CLOSE_CONSUMER, PRODUCER_SUCCESS, PING, PONG = 15, 16, 17, 18, 19
METADATA, METADATA_RESPONSE, LOOKUP, LOOKUP_RESPONSE = 21, 22, 23, 24
SEEK, LAST_ID, LAST_ID_RESPONSE, ACK_RESPONSE = 28, 29, 30, 38
"""Types of commands; each is also the number of the field that holds it."""
METADATA_ERROR, AUTHENTICATION_ERROR, CONSUMER_BUSY, TOPIC_NOT_FOUND = 1, 3, 5, 11
NOBODY = (1 << 64) - 1
"""-1, where the protocol has an unsigned number."""
CHECKSUM = b"\x0e\x01"
READY = 60.0

Position = tuple[int, int]
"""A ledger and an entry of it."""
EARLIEST = (-1, -1)


# ---- the wire format of protobuf


def encode(fields: dict[int, Any]) -> bytes:
    """A message of fields by number: integers, bytes, text, messages; lists repeat, None is left out."""
    out = bytearray()
    for number, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            if one is None:
                continue
            if isinstance(one, int):
                out += varint(number << 3) + varint(one & NOBODY)
            else:
                data = encode(one) if isinstance(one, dict) else one
                data = data.encode() if isinstance(data, str) else data
                out += varint(number << 3 | 2) + varint(len(data)) + data
    return bytes(out)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode(data: bytes) -> dict[int, list[Any]]:
    """The fields of a message: integers, or bytes."""
    found: dict[int, list[Any]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while at < len(data):
        key = number()
        if key & 7 == 0:
            value: Any = number()
        elif key & 7 == 2:
            size = number()
            value, at = data[at : at + size], at + size
        else:
            size = 8 if key & 7 == 1 else 4
            value, at = data[at : at + size], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


class Fields:
    """The fields of a command, by number."""

    def __init__(self, data: bytes) -> None:
        self._known = decode(data)

    def number(self, field: int, default: int = 0) -> int:
        value = self._known.get(field, [default])[-1]
        return value - (1 << 64) if value >= 1 << 63 else value

    def text(self, field: int) -> str:
        return self._known.get(field, [b""])[-1].decode()

    def has(self, field: int) -> bool:
        return field in self._known

    def all(self, field: int) -> list[Fields]:
        return [Fields(data) for data in self._known.get(field, [])]


# ---- topics


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


# ---- connections


class Consumer:
    """One of a connection's."""

    def __init__(self, connection: Connection, number: int, topic: Topic, name: str) -> None:
        self.connection, self.number, self.topic, self.name = connection, number, topic, name
        self.permits = 0

    def dispatch(self) -> None:
        """Send what is there, as far as permits go; a batch is sent whole."""
        cursor = self.topic.cursors.get(self.name)
        while self.permits > 0 and cursor is not None and cursor.consumer is self:
            found = self.topic.at(cursor.read)
            if found is None:
                return
            (ledger, number), entry = found
            place = {1: ledger, 2: number, 3: self.topic.partition}
            self.connection.send(MESSAGE, {1: self.number, 2: place}, entry.data)
            self.permits -= entry.count
            cursor.read = ledger, number + 1


class Connection:
    """A client's. Each command that is known has a method."""

    def __init__(self, server: Server, reader: Any, writer: Any) -> None:
        self.server, self.store = server, server.store
        self._reader, self._writer = reader, writer
        self.consumers: dict[int, Consumer] = {}
        self.producers: dict[int, Topic] = {}

    async def run(self) -> None:
        known = {
            CONNECT: self._connect, PING: self._ping, METADATA: self._metadata, LOOKUP: self._lookup,
            SUBSCRIBE: self._subscribe, FLOW: self._flow, ACK: self._ack, SEEK: self._seek,
            LAST_ID: self._last_id, CLOSE_CONSUMER: self._close_consumer,
            UNSUBSCRIBE: self._unsubscribe, PRODUCER: self._producer, CLOSE_PRODUCER: self._close_producer,
        }  # fmt: skip
        try:
            while True:
                (size,) = struct.unpack(">I", await self._reader.readexactly(4))
                frame = await self._reader.readexactly(size)
                (length,) = struct.unpack_from(">I", frame)
                command = Fields(frame[4 : 4 + length])
                kind = command.number(1)
                (inner,) = command.all(kind)
                if kind == SEND:
                    self._sent(inner, frame[4 + length :])
                elif kind in known:
                    known[kind](inner)
                await self._writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for number in list(self.consumers):
                self._leave(number)
            self._writer.close()

    def send(self, kind: int, fields: dict[int, Any], payload: bytes = b"") -> None:
        command = encode({1: kind, kind: fields})
        size = struct.pack(">II", 4 + len(command) + len(payload), len(command))
        self._writer.write(size + command + payload)

    def _fail(self, request: int, error: int, message: str) -> None:
        self.send(ERROR, {1: request, 2: error, 3: message})

    def _connect(self, command: Fields) -> None:
        self.server.connections += 1
        if self.server.token and command.text(3) != self.server.token:
            self._fail(-1, AUTHENTICATION_ERROR, "Failed to authenticate")
            self._writer.close()
            return
        version = command.number(4)
        self.send(CONNECTED, {1: "a stand-in", 2: version, 3: 5 * 1024 * 1024})

    def _ping(self, _: Fields) -> None:
        self.send(PONG, {})

    def _metadata(self, command: Fields) -> None:
        name, request = command.text(1), command.number(2)
        if name in self.store.partitions or name in self.store.topics:
            self.send(METADATA_RESPONSE, {1: self.store.partitions.get(name, 0), 2: request, 3: 0})
        else:
            fields = {2: request, 3: 1, 4: TOPIC_NOT_FOUND, 5: f"Topic not found {name}"}
            self.send(METADATA_RESPONSE, fields)

    def _lookup(self, command: Fields) -> None:
        url = f"pulsar://127.0.0.1:{self.server.port}"
        self.send(LOOKUP_RESPONSE, {1: url, 3: 1, 4: command.number(2), 5: 1})

    def _subscribe(self, command: Fields) -> None:
        name, number, request = command.text(2), command.number(4), command.number(5)
        topic = self.store.topics.get(command.text(1))
        if topic is None:
            self._fail(request, TOPIC_NOT_FOUND, f"Topic {command.text(1)} does not exist")
            return
        cursor = topic.cursors.get(name)
        if cursor is not None and cursor.consumer is not None:
            self._fail(request, CONSUMER_BUSY, "Exclusive consumer is already connected")
            return
        if cursor is None and command.number(8, 1):
            cursor = topic.cursors[name] = topic.durable(earliest=command.number(13) == 1)
            self.store.moved(topic, name, cursor)
        elif cursor is None:
            start = None
            for place in command.all(9):
                # PersistentTopic.getNonDurableSubscription: one step back, for it may be a part of a batch
                ledger, entry = place.number(1), place.number(2)
                start = (ledger, entry - 1) if ledger >= 0 and entry >= 0 else (ledger, entry)
            cursor = topic.cursors[name] = topic.non_durable(start)
        if cursor.durable and not cursor.resetting:  # what is not acknowledged is sent again
            cursor.read = topic.next_valid(cursor.mark)
        cursor.resetting = False
        cursor.consumer = self.consumers[number] = Consumer(self, number, topic, name)
        self.send(SUCCESS, {1: request})

    def _flow(self, command: Fields) -> None:
        consumer = self.consumers.get(command.number(1))
        if consumer is not None:
            consumer.permits += command.number(2)
            consumer.dispatch()

    def _ack(self, command: Fields) -> None:
        consumer = self.consumers.get(command.number(1))
        if consumer is not None:
            cursor = consumer.topic.cursors[consumer.name]
            for place in command.all(3):
                if not place.has(5):  # a part of a batch
                    position = place.number(1), place.number(2)
                    cumulative = command.number(2) == 1
                    consumer.topic.acknowledge(cursor, position, cumulative=cumulative)
            self.store.moved(consumer.topic, consumer.name, cursor)
        if command.has(8):
            self.send(ACK_RESPONSE, {1: command.number(1), 6: command.number(8)})

    def _seek(self, command: Fields) -> None:
        """PersistentSubscription.resetCursor: its consumers are closed first, and come back by themselves."""
        number, request = command.number(1), command.number(2)
        consumer = self.consumers.pop(number, None)
        if consumer is None:
            self._fail(request, METADATA_ERROR, "Consumer not found")
            return
        topic, cursor = consumer.topic, consumer.topic.cursors[consumer.name]
        cursor.consumer, cursor.resetting = None, True
        self.send(CLOSE_CONSUMER, {1: number, 2: -1})
        if command.has(4):
            topic.reset(cursor, topic.at_time(command.number(4)))
        else:
            (place,) = command.all(3)
            ledger, entry = place.number(1), place.number(2)
            topic.reset(cursor, (ledger, entry))
        self.store.moved(topic, consumer.name, cursor)
        self.send(SUCCESS, {1: request})

    def _last_id(self, command: Fields) -> None:
        """ServerCnx.getLargestBatchIndexWhenPossible: no id where the last entry was trimmed, or none ever was."""
        number, request = command.number(1), command.number(2)
        consumer = self.consumers.get(number)
        if consumer is None:
            self._fail(request, METADATA_ERROR, "Consumer not found")
            return
        topic = consumer.topic
        mark = topic.cursors[consumer.name].mark
        ledger, entry = topic.last
        index = -1
        if ledger in topic.ledgers:
            known = topic.ledgers[ledger][entry]
            index = known.count - 1 if known.is_batch else -1
        else:
            ledger = entry = -1
        last = {1: ledger, 2: entry, 3: topic.partition, 4: index}
        self.send(LAST_ID_RESPONSE, {1: last, 2: request, 3: {1: mark[0], 2: mark[1]}})

    def _leave(self, number: int) -> None:
        consumer = self.consumers.pop(number, None)
        if consumer is None:
            return
        cursor = consumer.topic.cursors.get(consumer.name)
        if cursor is not None and cursor.consumer is consumer:
            cursor.consumer = None
            if not cursor.durable:
                del consumer.topic.cursors[consumer.name]

    def _close_consumer(self, command: Fields) -> None:
        self._leave(command.number(1))
        self.send(SUCCESS, {1: command.number(2)})

    def _unsubscribe(self, command: Fields) -> None:
        consumer = self.consumers.get(command.number(1))
        if consumer is not None:
            self._leave(command.number(1))
            self.store.apply("unsubscribe", topic=consumer.topic.name, name=consumer.name)
        self.send(SUCCESS, {1: command.number(2)})

    def _producer(self, command: Fields) -> None:
        topic, request = self.store.topics.get(command.text(1)), command.number(3)
        if topic is None:
            self._fail(request, TOPIC_NOT_FOUND, f"Topic {command.text(1)} does not exist")
            return
        self.producers[command.number(2)] = topic
        name = command.text(4) or f"producer-{time.monotonic_ns()}"
        self.send(PRODUCER_SUCCESS, {1: request, 2: name, 3: -1, 4: b""})

    def _close_producer(self, command: Fields) -> None:
        self.producers.pop(command.number(1), None)
        self.send(SUCCESS, {1: command.number(2)})

    def _sent(self, command: Fields, payload: bytes) -> None:
        topic = self.producers[command.number(1)]
        ledger, entry = self.store.append(topic, payload)
        place = {1: ledger, 2: entry, 3: topic.partition}
        highest = command.number(6)
        self.send(SEND_RECEIPT, {1: command.number(1), 2: command.number(2), 3: place, 4: highest})
        for cursor in list(topic.cursors.values()):
            if cursor.consumer is not None:
                cursor.consumer.dispatch()

    def forget(self, topics: list[Topic]) -> None:
        """A topic was deleted: its consumers are closed."""
        for number, consumer in list(self.consumers.items()):
            if consumer.topic in topics:
                del self.consumers[number]
                self.send(CLOSE_CONSUMER, {1: number, 2: -1})


class Server:
    def __init__(self, port: int, folder: Path, token: str) -> None:
        self.port, self.token = port, token
        self.store = Store(folder / "topics.jsonl")
        self.clients: set[Connection] = set()
        self.connections = 0

    async def serve(self, admin: int) -> None:
        await asyncio.start_server(self._client, "127.0.0.1", self.port)
        await asyncio.start_server(self._admin, "127.0.0.1", admin)
        await asyncio.Event().wait()

    async def _client(self, reader: Any, writer: Any) -> None:
        connection = Connection(self, reader, writer)
        self.clients.add(connection)
        await connection.run()
        self.clients.discard(connection)

    async def _admin(self, reader: Any, writer: Any) -> None:
        with contextlib.suppress(OSError):
            answer = self._done(json.loads(await reader.readline()))
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
            writer.close()

    def _done(self, asked: dict[str, Any]) -> Any:
        """What `ask` has asked for."""
        do, name, store = asked.pop("do"), asked.pop("topic"), self.store
        known = {
            "make": self._make, "delete": self._delete, "skip": self._skip, "keep": self._keep, "roll": self._roll,
            "backlog": self._backlog, "subscriptions": self._subscriptions, "connections": self._connections,
        }  # fmt: skip
        return known[do](of_partitions(name, store.partitions.get(name, 0)), name, **asked)

    def _make(self, _: list[str], name: str, partitions: int = 0, **options: Any) -> None:
        """A topic; ``entries``: so many are in a ledger; ``retained``: though no subscription needs them."""
        self.store.make(name, partitions, options)

    def _delete(self, names: list[str], name: str) -> None:
        topics = [self.store.topics[part] for part in names]
        self.store.apply("delete", topic=name)
        for client in self.clients:
            client.forget(topics)

    def _skip(self, _: list[str], __: str, ledgers: int) -> None:
        """So many ledgers are other topics'."""
        self.store.ledger += ledgers

    def _keep(self, names: list[str], _: str, count: int) -> None:
        """Whole ledgers are removed, though a subscription may need them, as long as so many messages are left."""
        for part in names:
            self.store.apply("trim", topic=part, first=self.store.topics[part].expire(count))

    def _roll(self, names: list[str], _: str) -> None:
        """A ledger is begun, as by a broker that takes the topic over."""
        for part in names:
            self.store.roll(part)

    def _backlog(self, names: list[str], _: str, subscription: str) -> int:
        return sum(self.store.topics[part].backlog(subscription) for part in names)

    def _subscriptions(self, names: list[str], _: str) -> list[str]:
        return sorted({known for part in names for known in self.store.topics[part].cursors})

    def _connections(self, _: list[str], __: str) -> list[int]:
        """How many there have been, and how many there are."""
        return [self.connections, len(self.clients)]


def ask(port: int, do: str, topic: str = "", **more: Any) -> Any:
    """Have the broker with this admin port do something, such as `make` a topic."""
    name = f"persistent://public/default/{topic}" if topic else ""
    with socket.create_connection(("127.0.0.1", port), READY) as connection:
        connection.sendall(json.dumps({"do": do, "topic": name, **more}).encode() + b"\n")
        with connection.makefile("rb") as answer:
            return json.loads(answer.readline())


if __name__ == "__main__":
    _port, _admin_port, _folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    _token = sys.argv[4] if len(sys.argv) > 4 else ""
    asyncio.run(Server(_port, _folder, _token).serve(_admin_port))
