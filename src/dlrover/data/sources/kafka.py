"""Kafka, with the broker's own partitions and offsets. Transactional messages are read once committed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from dlrover.data.sources.stream import TIMEOUT, Address, Bounds, Broker, Fetched, Message
from dlrover.errors import ConfigurationError, InfrastructureError

_WAIT = 1.0
"""Seconds of one wait for a full request."""
_NOWHERE = -1, -1, -1
logger = logging.getLogger(__name__)


class Kafka(Broker):
    """``kafka://host:9092/topic``, several hosts with commas; user and password are those of SASL.

    Options with a dot are librdkafka's: ``?security.protocol=SASL_SSL&sasl.mechanism=PLAIN``. ``group`` is
    the consumer group that follows the job's progress.
    """

    def __init__(self, address: Address) -> None:
        import confluent_kafka as kafka  # noqa: PLC0415 - only if there is such a source

        super().__init__(address)
        topics = address.names("a topic as its path")
        if len(topics) > 1:
            raise ConfigurationError(
                f"The address {address} names {len(topics)} topics; one is read."
            )
        self._topic = topics[0]
        self.group = address.group
        given = {name: address.option(name) for name in address.options if name != "group"}
        for name in given:
            if "." not in name or name.startswith("group.") or name in _OWN:
                raise ConfigurationError(
                    f"The address {address} has an option {name}; it is not accepted."
                )
        if address.user:
            given |= {"sasl.username": address.user, "sasl.password": address.password}
            given.setdefault("security.protocol", "SASL_SSL")
            given.setdefault("sasl.mechanism", "PLAIN")
        self._settings = {
            "socket.timeout.ms": int(TIMEOUT * 1000),
            **given,
            "bootstrap.servers": address.servers,
            # librdkafka requires a name; without a group nothing is committed
            "group.id": self.group or "dlrover",
            "error_cb": self._note,
            **_OWN,
        }
        self._kafka = kafka
        self.transient = (kafka.KafkaException, OSError)
        self.hopeless = ()
        self._consumer: Any = None
        self._admin: Any = None
        self._has_ids = True
        """False while this connection gets no ids."""
        self._at = _NOWHERE
        """Partition, offset behind the last message that was handed out, and offset up to which there are no others."""
        self._following: deque[tuple[int, Message | None]] = deque()
        """What the consumer has delivered from there on; see `_taken`."""
        self._found = False
        """True if the topic has been found once."""
        self._cause = ""
        """What librdkafka has met during the call, in words, such as a refused certificate."""

    @property
    def identity(self) -> str:
        """The topic."""
        return f"kafka {self._topic}"

    def bounds(self) -> list[Bounds]:
        """Return the bounds of each partition."""
        with self._explained():
            consumer = self._connected()
            cluster = consumer.list_topics(self._topic, timeout=TIMEOUT)
            topic = cluster.topics[self._topic]
            if topic.error is not None:
                raise self._refusal(topic.error)
            self._found = True
            found = [self._bounds(number) for number in range(len(topic.partitions))]
            if self._has_ids and cluster.controller_id in cluster.brokers:
                self._look_up_id()
            return found

    def _look_up_id(self) -> None:
        """Look up the topic's id, which Kafka has from 2.8 on; earlier brokers answer with an empty one.

        The controller answers; messages are read also where a worker cannot reach it.
        """
        from confluent_kafka import admin  # noqa: PLC0415 - only if there is such a source

        if self._admin is None:
            self._admin = admin.AdminClient(self._settings, logger=logger)
        topics = self._kafka.TopicCollection([self._topic])
        asked = self._admin.describe_topics(topics, request_timeout=TIMEOUT)
        try:
            found = str(asked[self._topic].result(2 * TIMEOUT).topic_id)
        except self._kafka.KafkaException as error:
            self._admin, self._has_ids = None, False
            logger.warning(
                "%s tells no id of its topic, so the job does not notice if the topic is created again: %s",
                self.address, self.address.scrubbed(error),
            )  # fmt: skip
            return
        if found != str(self._kafka.Uuid(0, 0)):
            self.source_ids = {self._topic: found}

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise a failure of the line with its cause, which the client reports beside its calls."""
        self._cause = ""
        try:
            yield
        except (self._kafka.KafkaException, TimeoutError) as error:
            if self._consumer is not None:
                self._consumer.poll(0)
            if not self._cause:
                raise
            raise ConnectionError(self._cause) from error

    def _note(self, error: Any) -> None:
        if error.code() != self._kafka.KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 - its name
            self._cause = error.str()

    def offsets_at(self, when: datetime, bounds: list[Bounds]) -> list[int]:
        """Return, by the messages' time stamps, the first offsets that are not earlier."""
        at = int(when.timestamp() * 1000)
        asked = self._places([at] * len(bounds))
        with self._explained():
            found = self._connected().offsets_for_times(asked, timeout=TIMEOUT)
            for place in found:
                if place.error is not None:
                    raise self._refusal(place.error)
        return [
            place.offset if place.offset >= 0 else end
            for place, (_, end) in zip(found, bounds, strict=True)
        ]

    def commit(self, offsets: list[int]) -> None:
        """Commit the group's offsets; a broker refuses this if the group has consumers."""
        with self._explained():
            consumer = self._connected()
            for place in consumer.commit(offsets=self._places(offsets), asynchronous=False):
                if place.error is not None:
                    raise self._refusal(place.error)

    def _places(self, offsets: list[int]) -> list[Any]:
        make = self._kafka.TopicPartition
        return [make(self._topic, number, offset) for number, offset in enumerate(offsets)]

    def _refusal(self, error: Any) -> Exception:
        """Return the exception for a broker's error; some errors are permanent."""
        names = _HOPELESS if self._found else _HOPELESS + _ABSENT
        if error.code() in {getattr(self._kafka.KafkaError, name) for name in names}:
            # Perhaps only now, as of a broker that has just started: the worker starts again.
            return InfrastructureError(f"{self.address} cannot be read: {error.str()}.")
        found: Exception = self._kafka.KafkaException(error)
        return found

    def fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        """Fetch messages; a consumer continues where it was, or is moved."""
        with self._explained():
            return self._fetch(partition, start, stop, most)

    def _fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        consumer = self._connected()
        if not self._goes_on_at(partition, start):
            consumer.assign([self._kafka.TopicPartition(self._topic, partition, start)])
            self._following.clear()
            self._at = partition, start, start
        found: list[Message] = []
        at, behind = max(start, self._at[2]), start
        self._at, gone = _NOWHERE, False
        while at < stop and len(found) < most and (self._following or not gone):
            if not self._following:
                gone = self._receive(min(most - len(found), stop - at))
                continue
            offset, message = self._following[0]
            at = max(at, offset)
            if message is None or offset < stop:
                self._following.popleft()
            if message is not None and offset < stop:
                found.append(message)
                at = behind = offset + 1
        if not gone:
            # What a compaction or an aborted transaction leaves out was not removed before it was read.
            self._at = (partition, behind, at)
            return Fetched(found, at, start)
        if at == start:
            end = self._bounds(partition).end
            raise TimeoutError(
                f"partition {partition} ends at offset {end}, and the job reads from {start}: the topic was recreated or"
                " has lost messages"
            )
        return Fetched(found, at, at)

    def _goes_on_at(self, partition: int, start: int) -> bool:
        """Return whether no message lies between the reader's position and an offset."""
        known, behind, at = self._at
        return known == partition and behind <= start <= at

    def _receive(self, most: int) -> bool:
        """Receive what follows; return True if it does not exist any more and nothing else comes."""
        until = time.monotonic() + TIMEOUT
        while not (got := self._connected().consume(most, _WAIT)):
            if time.monotonic() > until:
                raise TimeoutError("the messages that it has do not come")
        self._following.extend(map(self._taken, got))
        return any(self._is_gone(message.error()) for message in got)

    def _is_gone(self, error: Any) -> bool:
        """Return whether the requested offset does not exist any more; the consumer then fetches nothing else."""
        reset = self._kafka.KafkaError._AUTO_OFFSET_RESET  # noqa: SLF001 - its name
        return error is not None and error.code() == reset

    def _taken(self, message: Any) -> tuple[int, Message | None]:
        """Return a message with its offset; or None, and an offset before which there are no more messages."""
        error = message.error()
        if error is None:
            place = message.partition(), message.offset()
            headers = dict(message.headers() or ())
            return place[1], Message(*place, message.value(), message.key(), headers)
        if error.code() == self._kafka.KafkaError._PARTITION_EOF:  # noqa: SLF001 - its name
            return int(message.offset()), None
        if self._is_gone(error):
            return self._bounds(message.partition()).first, None
        raise self._refusal(error)

    def _bounds(self, partition: int) -> Bounds:
        place = self._kafka.TopicPartition(self._topic, partition)
        first, end = self._connected().get_watermark_offsets(place, timeout=TIMEOUT)
        return Bounds(first, end)

    def _connected(self) -> Any:
        if self._consumer is None:
            try:
                self._consumer = self._kafka.Consumer(self._settings, logger=logger)
            except self._kafka.KafkaException as error:  # nothing is connected yet
                raise ConfigurationError(
                    f"librdkafka refuses the options of {self.address}: {error.args[0].str()}."
                ) from None
        return self._consumer

    def close(self) -> None:
        """Close the connection."""
        if self._consumer is not None:
            self._consumer.close()
        self._consumer = self._admin = None
        self._has_ids, self._at = True, _NOWHERE
        self._following.clear()


_OWN = {
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "allow.auto.create.topics": False,
    "log_level": 2,  # what fails is raised, and would be logged ten times a second
}
"""Settings that the way of reading depends on."""
_HOPELESS = (
    "TOPIC_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "SASL_AUTHENTICATION_FAILED",
    "_AUTHENTICATION",
)
"""Errors that waiting does not mend."""
_ABSENT = ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "TOPIC_EXCEPTION")
"""Errors about a missing topic; for a topic that was there before, a broker may not know it at the moment."""
