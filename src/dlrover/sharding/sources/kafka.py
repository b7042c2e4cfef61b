"""Kafka: partitions and offsets are the broker's own. Messages of transactions are read once they are committed."""

from __future__ import annotations

import logging
from typing import Any

from dlrover.errors import ConfigurationError
from dlrover.sharding.sources.stream import TIMEOUT, Address, Bounds, Broker, Fetched, Message

_WAIT = 1.0
"""Seconds of one wait for messages."""
logger = logging.getLogger(__name__)


class Kafka(Broker):
    """``kafka://host:9092/topic``, several hosts with commas; user and password are those of SASL.

    Options with a dot are librdkafka's: ``?security.protocol=SASL_SSL&sasl.mechanism=PLAIN``.
    """

    needs = "confluent-kafka"

    def __init__(self, address: Address) -> None:
        import confluent_kafka as kafka  # noqa: PLC0415 - only if there is such a source

        super().__init__(address)
        (self._topic,) = address.names(address.path, "a topic as its path")[:1]
        given = {name: address.option(name) for name in address.options}
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
            "group.id": "dlrover",  # a name that librdkafka asks for; nothing is committed
            **_OWN,
        }
        self._kafka = kafka
        self.transient = (kafka.KafkaException, TimeoutError)
        self.hopeless = ()
        self._consumer: Any = None
        self._at = (-1, -1)

    @property
    def identity(self) -> str:
        """The topic."""
        return f"kafka {self._topic}"

    def bounds(self) -> list[Bounds]:
        """How much each partition keeps."""
        consumer = self._connected()
        topic = consumer.list_topics(self._topic, timeout=TIMEOUT).topics[self._topic]
        if topic.error is not None:
            raise self._kafka.KafkaException(topic.error)
        return [self._bounds(number) for number in range(len(topic.partitions))]

    def fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        """Read messages; a consumer goes on where it was, or is sent to another place."""
        consumer = self._connected()
        if self._at != (partition, start):
            consumer.assign([self._kafka.TopicPartition(self._topic, partition, start)])
        found: list[Message] = []
        at = start
        while at < stop and len(found) < most:
            got = consumer.consume(min(most - len(found), stop - at), _WAIT)
            if not got:
                self._at = (-1, -1)
                raise TimeoutError("the messages that it has do not come")
            for message in got:
                at = max(at, self._taken(message, found, stop))
        # What was fetched from ``stop`` on is fetched again, by whoever gets it.
        self._at = (partition, at) if at <= stop else (-1, -1)
        return Fetched(found, min(at, stop), max(start, self._bounds(partition).first))

    def _taken(self, message: Any, found: list[Message], stop: int) -> int:
        """Keep a message; the offset up to which all are there by now."""
        error = message.error()
        if error is None:
            if message.offset() < stop:
                headers = dict(message.headers() or ())
                found.append(
                    Message(
                        message.partition(),
                        message.offset(),
                        message.value(),
                        message.key(),
                        headers,
                    )
                )
            return int(message.offset()) + 1
        if error.code() == self._kafka.KafkaError._PARTITION_EOF:  # noqa: SLF001 - its name
            return int(message.offset())
        if error.code() == self._kafka.KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001 - its name
            return self._bounds(
                message.partition()
            ).first  # what was asked for is not there any more
        raise self._kafka.KafkaException(error)

    def _bounds(self, partition: int) -> Bounds:
        place = self._kafka.TopicPartition(self._topic, partition)
        first, end = self._connected().get_watermark_offsets(place, timeout=TIMEOUT)
        return Bounds(first, end)

    def _connected(self) -> Any:
        if self._consumer is None:
            self._consumer = self._kafka.Consumer(self._settings, logger=logger)
        return self._consumer

    def close(self) -> None:
        """Close the connection."""
        if self._consumer is not None:
            self._consumer.close()
        self._consumer, self._at = None, (-1, -1)


_OWN = {
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "allow.auto.create.topics": False,
}
"""Settings that the way of reading depends on."""
