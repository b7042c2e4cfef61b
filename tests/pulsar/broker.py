"""A stand-in for a Pulsar broker, in a process of its own: it speaks Pulsar's binary protocol, and is no real broker.

``python -m tests.pulsar.broker PORT ADMIN_PORT FOLDER [TOKEN]`` keeps its topics in a file of the folder. What it does
at each command was looked up in Pulsar's sources (PulsarApi.proto, ServerCnx, PersistentSubscription). Topics are made
by `ask`; a topic that nobody has made is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from tests.pulsar.topics import Store, Topic, of_partitions
from tests.pulsar.wire import Fields, encode

CONNECT, CONNECTED, SUBSCRIBE, PRODUCER, SEND, SEND_RECEIPT = 2, 3, 4, 5, 6, 7
MESSAGE, ACK, FLOW, UNSUBSCRIBE, SUCCESS, ERROR = 9, 10, 11, 12, 13, 14
CLOSE_PRODUCER, CLOSE_CONSUMER, PRODUCER_SUCCESS, PING, PONG = 15, 16, 17, 18, 19
METADATA, METADATA_RESPONSE, LOOKUP, LOOKUP_RESPONSE = 21, 22, 23, 24
SEEK, LAST_ID, LAST_ID_RESPONSE, ACK_RESPONSE = 28, 29, 30, 38
"""Types of commands; each is also the number of the field that holds it."""
METADATA_ERROR, AUTHENTICATION_ERROR, CONSUMER_BUSY, TOPIC_NOT_FOUND = 1, 3, 5, 11
READY = 60.0
"""Seconds that an answer to `ask` may take."""


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
