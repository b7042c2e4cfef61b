"""Apache Pulsar, with the topic's partitions; an offset is the id of a message as one number.

Pulsar keeps a partition in ledgers, and removes whole ledgers. Ledger ids only grow and belong to the
cluster, so a partition has gaps between them. A producer's batch is one entry of a ledger.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import datetime
from typing import Any, NamedTuple

from dlrover.data.sources.stream import (
    SHARD,
    TIMEOUT,
    Address,
    Bounds,
    Broker,
    Fetched,
    Message,
)
from dlrover.errors import ConfigurationError

_BATCH = 12
"""Bits of an offset for the position in a batch."""
_ENTRY = 20
"""Bits above these for the entry of a ledger; the ledger's id is above them."""
_LEDGER = _ENTRY + _BATCH
_LARGEST = (1 << 31) - 1, (1 << _ENTRY) - 1, (1 << _BATCH) - 1
_FRESH = 10.0
"""Seconds for which the first message of a partition is cached."""
_BUSY = 1.0
"""Seconds for which other workers of the job may hold the subscription open."""
_HOPELESS = (
    "AuthenticationError",
    "AuthorizationError",
    "ErrorGettingAuthenticationData",
    "InvalidConfiguration",
    "InvalidTopicName",
    "InvalidUrl",
    "OperationNotSupported",
    "TopicNotFound",
    "UnsupportedVersionError",
)
"""Errors that waiting does not mend."""
_of_parents: list[Any] = []
"""Clients of the process that this one was forked from; they have no threads here and cannot be ended."""


class Pulsar(Broker):
    """``pulsar://user:password@host:6650/tenant/namespace/topic``; ``pulsar+ssl`` with TLS, a token as user.

    With ``group=NAME``, a durable subscription shows the job's progress and keeps unread messages.
    """

    sparse = True

    def __init__(self, address: Address) -> None:
        import pulsar  # noqa: PLC0415 - only if there is such a source

        super().__init__(address)
        address.accept("group")
        self.group = address.group
        self._topic = _topic(address)
        self._pulsar = pulsar
        self.transient = (pulsar.PulsarException, TimeoutError)
        self.hopeless = tuple(getattr(pulsar, name) for name in _HOPELESS)
        self._client: Any = None
        self._process = 0
        self._names: list[str] = []
        """Topic of each partition."""
        self._subscribed: set[str] = set()
        self._readers: dict[int, _PartitionReader] = {}
        self._tails: dict[int, Any] = {}
        """By partition: a reader that has read the last message."""
        self._ends: dict[int, int] = {}
        self._firsts: dict[int, tuple[float, int]] = {}
        """By partition: when its first message was looked up, and the offset."""
        self._batch = 1
        """Messages in the last batch seen at the end of a partition."""

    @property
    def identity(self) -> str:
        """The topic."""
        return f"pulsar {self._topic}"

    def bounds(self) -> list[Bounds]:
        """Return the bounds of each partition; create the subscription if it does not exist."""
        names = self._partitions()
        for name in names:
            self._subscribe_once(name)
        return [self._bounds(number) for number in range(len(names))]

    def _partitions(self) -> list[str]:
        self._names = self._connected().get_topic_partitions(self._topic)
        return self._names

    def _subscribe_once(self, name: str) -> None:
        """Create the subscription, so that new messages are kept for it."""
        if not self.group or name in self._subscribed:
            return
        with contextlib.suppress(self._pulsar.ConsumerBusy):  # so the subscription exists
            self._subscribe(name).close()
        self._subscribed.add(name)

    def _bounds(self, number: int) -> Bounds:
        end = self._end(number)
        if not end:
            return Bounds(0, 0)
        looked_up, first = self._firsts.get(number, (0.0, 0))
        if not looked_up or time.monotonic() - looked_up > _FRESH:
            found = self._first(number)
            first = end if found is None else min(found, end)
            self._firsts[number] = time.monotonic(), first
        return Bounds(first, end)

    def _end(self, number: int) -> int:
        """Return the offset behind the last message; a reader at the end shows whether one has followed."""
        tail = self._tails.get(number)
        if tail is None or tail.has_message_available():
            self._close_tail(number)
            tail = self._tails[number] = self._open(number, self._pulsar.MessageId.latest, 1)
            if tail.has_message_available():
                found = _found(tail)
                self._ends[number] = found.offset + 1
                self._batch = max(self._batch, found.message.message_id().batch_index() + 1)
        return self._ends.get(number, 0)

    def _close_tail(self, number: int) -> None:
        tail = self._tails.pop(number, None)
        if tail is not None:
            tail.close()

    def _first(self, number: int) -> int | None:
        """Return the offset of the first message; None if there is none."""
        reader = self._open(number, self._pulsar.MessageId.earliest, 1)
        try:
            return _found(reader).offset if reader.has_message_available() else None
        finally:
            reader.close()

    def shard(self, bounds: list[Bounds]) -> int:
        """Return the number of offsets for about a hundred messages in batches as large as the last ones."""
        return max(1, SHARD // self._batch) << _BATCH

    def offsets_at(self, when: datetime, bounds: list[Bounds]) -> list[int]:
        """Return the offsets by the messages' publication time; a batch has one time."""
        found = []
        for number, (_, end) in enumerate(bounds):
            reader = self._open(number, self._pulsar.MessageId.earliest, 1)
            try:
                reader.seek(int(when.timestamp() * 1000))
                found.append(_found(reader).offset if reader.has_message_available() else end)
            finally:
                reader.close()
        return found

    def fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        """Fetch messages with a reader that lasts while reading continues where it was."""
        reader = self._reader(partition, start, most)
        messages: list[Message] = []
        at = first = start
        while at < stop and len(messages) < most:
            found = reader.next()
            kept = self._kept(partition, at, stop, reader)
            if kept > at:
                if messages:
                    break  # reported when that offset is requested
                first = kept
            if found is None or found.offset >= stop:
                at = stop if found is None else found.offset
                break
            messages.append(_message(partition, found))
            at = reader.take()
        reader.at = min(at, stop)
        return Fetched(messages, at, first)

    def _kept(self, partition: int, at: int, stop: int, reader: _PartitionReader) -> int:
        """Return the offset up to which messages from ``at`` on may have been removed; ``at`` if none.

        The end of a ledger is only a gap. So is everything before the first ledger of a topic that was empty.
        """
        following = reader.next()
        if following is None:  # although there was a message before the end
            return stop
        ledger = at >> _LEDGER
        if ledger and not reader.is_whole and ledger != following.offset >> _LEDGER:
            first = self._first(partition)
            if first is None or first > at:
                return min(following.offset, stop)
        reader.is_whole = True
        return at

    def _reader(self, partition: int, start: int, most: int) -> _PartitionReader:
        reader = self._readers.get(partition)
        if reader is None or not reader.goes_on_at(start):
            if reader is not None:
                del self._readers[partition]
                reader.close()
            place = self._id(partition, start)
            reader = _PartitionReader(self._open(partition, place, most), start)
            self._readers[partition] = reader
        return reader

    def _open(self, number: int, place: Any, ahead: int) -> Any:
        """Return a reader from a message on, which prefetches about ``ahead`` messages."""
        client = self._connected()
        names = self._names or self._partitions()
        return client.create_reader(
            names[number], place, receiver_queue_size=ahead, start_message_id_inclusive=True
        )

    def _id(self, partition: int, offset: int) -> Any:
        """Return the message id at an offset. A message outside of batches has no position in one."""
        ledger, entry = offset >> _LEDGER, offset >> _BATCH & _LARGEST[1]
        return self._pulsar.MessageId(partition, ledger, entry, (offset & _LARGEST[2]) or -1)

    def commit(self, offsets: list[int]) -> None:
        """Move the subscription to the last message in the checkpoint, so that its ledger is kept.

        Raises:
            ConfigurationError: the subscription has consumers.
        """
        names = self._partitions()
        for number, offset in enumerate(offsets):
            consumer = self._subscribed_alone(names[number])
            last = self._id(number, offset - 1) if offset else self._pulsar.MessageId.earliest
            try:
                consumer.seek(last)
            finally:
                with contextlib.suppress(self._pulsar.PulsarException):
                    consumer.close()

    def _subscribed_alone(self, name: str) -> Any:
        until = time.monotonic() + _BUSY
        while True:
            try:
                return self._subscribe(name)
            except self._pulsar.ConsumerBusy:
                if time.monotonic() > until:
                    raise ConfigurationError(
                        f"The subscription {self.group} of {self.address} has consumers; name a"
                        " subscription without consumers."
                    ) from None
            threading.Event().wait(_BUSY / 10)

    def _subscribe(self, name: str) -> Any:
        return self._connected().subscribe(
            name,
            self.group,
            receiver_queue_size=1,
            initial_position=self._pulsar.InitialPosition.Earliest,
        )

    def _connected(self) -> Any:
        if self._client is None:
            pulsar, address = self._pulsar, self.address
            self._process = os.getpid()
            try:
                self._client = pulsar.Client(
                    f"{address.scheme}://{address.servers}",
                    authentication=_credentials(address),
                    operation_timeout_seconds=int(TIMEOUT),
                    connection_timeout_ms=int(TIMEOUT * 1000),
                    tls_validate_hostname=True,
                    logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
                )
            except ValueError as error:
                raise ConfigurationError(
                    f"The address {address} is not accepted by pulsar-client: {error}."
                ) from None
        return self._client

    def close(self) -> None:
        """Close the connection and all readers."""
        if self._client is None:
            return
        readers = [*self._readers.values(), *self._tails.values()]
        if self._process == os.getpid():
            self._client.shutdown()
            # Closing a reader no longer blocks now. It and the client refer to each other.
            for reader in readers:
                with contextlib.suppress(self._pulsar.PulsarException):
                    reader.close()
        else:
            _of_parents.append((self._client, readers))
        self._client, self._readers, self._tails = None, {}, {}
        self._firsts = {}


class _Found(NamedTuple):
    """A message of the client, and its offset."""

    offset: int
    message: Any


class _PartitionReader:
    """Messages of a partition from ``at`` on, in order."""

    def __init__(self, reader: Any, at: int) -> None:
        self._reader, self.at = reader, at
        self._following: _Found | None = None
        self.is_whole = False
        """True after a check that nothing is missing before the next message."""

    def goes_on_at(self, start: int) -> bool:
        """Return whether no message lies between the reader's position and an offset."""
        following = self._following
        return start == self.at or (following is not None and self.at < start <= following.offset)

    def next(self) -> _Found | None:
        """Return the next message, which remains the next one until `take`; None if there is none."""
        while self._following is None and self._reader.has_message_available():
            found = _found(self._reader)
            # A message outside of batches arrives even if the offset is behind it.
            self._following = found if found.offset >= self.at else None
        return self._following

    def take(self) -> int:
        """Move behind the next message; return the offset there."""
        assert self._following is not None, "nothing was read"
        self.at = self._following.offset + 1
        self._following, self.is_whole = None, False
        return self.at

    def close(self) -> None:
        """Remove the reader from the broker."""
        self._reader.close()


def _topic(address: Address) -> str:
    """Return the full name of the topic."""
    parts = address.path.split("/")
    if parts[0] == "persistent" and len(parts) > 1:
        parts = parts[1:]
    if len(parts) == 1:
        parts = ["public", "default", *parts]
    if len(parts) != 3 or not all(parts):
        raise ConfigurationError(
            f"The address {address} has the path {address.path!r}; accepted: a topic, or tenant/namespace/topic."
        )
    return f"persistent://{'/'.join(parts)}"


def _credentials(address: Address) -> Any:
    import pulsar  # noqa: PLC0415 - only if there is such a source

    if address.user and address.password:
        return pulsar.AuthenticationBasic(address.user, address.password)
    token = address.user or address.password
    return pulsar.AuthenticationToken(token) if token else None


def _found(reader: Any) -> _Found:
    """Read the next message from a client's reader that has one."""
    message = reader.read_next(int(TIMEOUT * 1000))
    place = message.message_id()
    parts = place.ledger_id(), place.entry_id(), max(0, place.batch_index())
    if any(part > largest for part, largest in zip(parts, _LARGEST, strict=True)):
        raise ConfigurationError(
            f"The message {':'.join(map(str, parts))} of a Pulsar topic has no offset: ledger, entry and place in a"
            f" batch may be up to {', '.join(map(str, _LARGEST))}."
        )
    return _Found(parts[0] << _LEDGER | parts[1] << _BATCH | parts[2], message)


def _message(partition: int, found: _Found) -> Message:
    message = found.message
    key = message.partition_key().encode() or None
    return Message(partition, found.offset, message.data(), key, dict(message.properties()))
