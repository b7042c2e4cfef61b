"""A stand-in for a Kafka that answers what a consumer asks, with any log: librdkafka's mock has no transactions and no gaps."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any

METADATA, LIST_OFFSETS, FETCH, COORDINATOR, VERSIONS = 3, 2, 1, 10, 18
_SPOKEN = {0: 7, FETCH: 4, LIST_OFFSETS: 2, METADATA: 4, COORDINATOR: 0, VERSIONS: 0}
"""By request: the newest version."""
_WITH_IDS = 12
"""Version of `METADATA` that has the ids of topics."""
_TRANSACTIONAL, _CONTROL = 0x10, 0x20
_PIECE = 3000
"""Bytes of an answer."""


class Log:
    """A partition; each message is its offset as text."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, bytes]] = []
        self.first = self.end = 0
        #: the first offset of an open transaction
        self.stable: int | None = None
        self.aborted: list[tuple[int, int]] = []

    def add(self, offsets: range | list[int], *, in_transaction: bool = False) -> None:
        """Add messages at offsets, which may have gaps, as a compaction leaves them."""
        for at in offsets:
            self._add(at, None, b"%d" % at, _TRANSACTIONAL if in_transaction else 0)

    def end_transaction(self, begin: int, *, commit: bool) -> None:
        """Add the record that ends a transaction, which began at an offset."""
        key = struct.pack(">hh", 0, commit)
        if not commit:
            self.aborted.append((begin, self.end))
        self._add(self.end, key, bytes(6), _TRANSACTIONAL | _CONTROL)

    def _add(self, at: int, key: bytes | None, value: bytes, attributes: int) -> None:
        record = b"\0\0\0" + _sized(key) + _sized(value) + b"\0"
        producer = 1 if attributes else -1
        head = struct.pack(">hiqqqhii", attributes, 0, 0, 0, producer, 0, -1, 1)
        body = struct.pack(">ibI", 0, 2, 0) + head + _sized(record)
        self.batches.append((at, struct.pack(">qi", at, len(body)) + body))
        self.end = at + 1

    @property
    def stable_end(self) -> int:
        return self.end if self.stable is None else self.stable


def _varint(number: int) -> bytes:
    number, out = number << 1 if number >= 0 else -2 * number - 1, b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def _sized(data: bytes | None) -> bytes:
    return _varint(-1) if data is None else _varint(len(data)) + data


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


class Kafka:
    """A server with one topic, ``t``, whose partitions are logs."""

    def __init__(self, *logs: Log) -> None:
        self.logs = logs
        #: 16 bytes; without, it is a Kafka from before 2.8
        self.topic_id = b""
        #: port of another broker, the controller
        self.controller = 0
        self.fetches = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lines: list[socket.socket] = []
        self._start(self._accept)

    def _start(self, work: Any, *args: object) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._lines.append(self._server.accept()[0])
                self._start(self._serve, self._lines[-1])

    def _serve(self, line: socket.socket) -> None:
        answers = {
            VERSIONS: self._versions,
            METADATA: self._metadata,
            LIST_OFFSETS: self._offsets,
            FETCH: self._fetch,
            COORDINATOR: lambda _: struct.pack(">hihi", 15, -1, 0, -1),
        }
        with contextlib.suppress(OSError), line.makefile("rb") as requests:
            while len(size := requests.read(4)) == 4:
                request = _Request(requests.read(*struct.unpack(">i", size)))
                kind, version, number = request.take("hhi")
                request.text()
                newer = kind == VERSIONS and version > 0
                answer = self._versions(request, 35) if newer else answers[kind](request)
                if (kind, version) == (METADATA, _WITH_IDS):
                    answer = self._metadata_with_id()
                line.sendall(struct.pack(">ii", len(answer) + 4, number) + answer)

    def _versions(self, _: _Request, error: int = 0) -> bytes:
        newest = _SPOKEN | ({METADATA: _WITH_IDS} if self.topic_id else {})
        spoken = b"".join(struct.pack(">hhh", kind, 0, last) for kind, last in newest.items())
        return struct.pack(">hi", error, len(newest)) + spoken

    def _metadata(self, _: _Request) -> bytes:
        ports = [self.port, self.controller] if self.controller else [self.port]
        here = struct.pack(">ii", 0, len(ports))
        for at, port in enumerate(ports, 1):
            here += struct.pack(">i", at) + _text("127.0.0.1") + struct.pack(">ih", port, -1)
        topic = struct.pack(">iih", len(ports), 1, 0) + _text("t")
        topic += struct.pack(">bi", 0, len(self.logs))
        for number in range(len(self.logs)):
            topic += struct.pack(">hiiiiii", 0, number, 1, 1, 1, 1, 1)
        return here + _text("cluster") + topic

    def _metadata_with_id(self) -> bytes:
        """The same as the newer protocol writes it: lengths plus one, and tags, of which there are none."""
        host, one = b"\x0a127.0.0.1", struct.pack(">bi", 2, 1)
        broker = struct.pack(">i", 1) + host + struct.pack(">ibb", self.port, 0, 0)
        topic = struct.pack(">h", 0) + b"\x02t" + self.topic_id + b"\0"
        topic += struct.pack(">b", 1 + len(self.logs))
        for number in range(len(self.logs)):
            topic += struct.pack(">hiii", 0, number, 1, 1) + 2 * one + b"\x01\0"
        topic += struct.pack(">ib", -1 << 31, 0)
        head = b"\0" + struct.pack(">ib", 0, 2) + broker + b"\x08cluster" + struct.pack(">i", 1)
        return head + b"\x02" + topic + b"\0"

    def _offsets(self, request: _Request) -> bytes:
        _, committed, _ = request.take("ibi")
        request.text()
        _, number, when = request.take("iiq")
        log = self.logs[number]
        at = log.first if when == -2 else log.stable_end if committed else log.end
        return struct.pack(">ii", 0, 1) + _text("t") + struct.pack(">iihqq", 1, number, 0, -1, at)

    def _fetch(self, request: _Request) -> bytes:
        self.fetches += 1
        _, wait, _, _, _, topics = request.take("iiiibi")
        head = struct.pack(">ii", 0, topics)
        if not topics:
            self._over.wait(wait / 1000)
            return head
        request.text()
        _, number, start, _ = request.take("iiqi")
        log = self.logs[number]
        head += _text("t") + struct.pack(">ii", 1, number)
        if not log.first <= start <= log.end:
            return head + struct.pack(">hqqii", 1, -1, -1, -1, 0)
        data = b""
        for at, batch in log.batches:
            if start <= at < log.stable_end and len(data) < _PIECE:
                data += batch
        if not data:
            self._over.wait(wait / 1000)
        aborted = [begin for begin, end in log.aborted if end >= start]
        head += struct.pack(">hqqi", 0, log.end, log.stable_end, len(aborted))
        return (
            head
            + b"".join(struct.pack(">qq", 1, begin) for begin in aborted)
            + struct.pack(">i", len(data))
            + data
        )

    def close(self) -> None:
        """End it."""
        self._over.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._server, *self._lines):
            end.close()


class _Request:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, kinds: str) -> tuple[int, ...]:
        found = struct.unpack_from(f">{kinds}", self._data, self._at)
        self._at += struct.calcsize(f">{kinds}")
        return found

    def text(self) -> None:
        (size,) = self.take("h")
        self._at += max(0, size)
