"""RabbitMQ streams by AMQP: each queue is a partition; offsets are the broker's own, with gaps.

AMQP needs no plugin of the broker. Acknowledgments move nothing in a stream, and none are sent.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from dlrover.data.sources.stream import TIMEOUT, Address, Bounds, Broker, Fetched, Message
from dlrover.errors import ConfigurationError

_FILLED = 5.0
"""Seconds that an existing message may take to arrive."""
_EMPTY = 1.0
"""Seconds after which a queue that has no message by the broker's count is empty, and its last chunk complete."""
_QUIET = 0.05
"""Seconds without a message after which a chunk counts as complete, once it has what was there before."""
_LONGEST = 255
"""Maximum bytes of a name in AMQP."""
_CHUNK = 5000
"""Maximum number of messages in a chunk."""
_REFUSED = {403, 404, 405, 406}
"""Codes of channel closures by the broker that a retry would repeat."""


class RabbitMq(Broker):
    """``amqp://user:password@host:5672/queue?vhost=/``; ``amqps`` with TLS."""

    def __init__(self, address: Address) -> None:
        import pika  # noqa: PLC0415 - only if there is such a source
        from pika import exceptions  # noqa: PLC0415
        from pika.adapters.utils import connection_workflow  # noqa: PLC0415

        super().__init__(address)
        address.accept("vhost")
        self._queues = address.names("a queue as its path")
        for name in self._queues:
            if len(name.encode()) > _LONGEST:
                raise ConfigurationError(
                    f"The address {address} has a queue whose name has {len(name.encode())} bytes; up to {_LONGEST} are"
                    " accepted."
                )
        self.transient = (
            OSError,
            exceptions.AMQPError,
            connection_workflow.AMQPConnectorException,
        )
        self.hopeless = (
            exceptions.ProbableAuthenticationError,
            exceptions.AuthenticationError,
            exceptions.ProbableAccessDeniedError,
            exceptions.ChannelClosedByBroker,
        )
        self._parameters = pika.ConnectionParameters(
            host=address.host,
            port=address.port or (5671 if address.scheme == "amqps" else 5672),
            virtual_host=address.option("vhost", "/"),
            credentials=pika.PlainCredentials(address.user or "guest", address.password or "guest"),
            ssl_options=_tls(address.host) if address.scheme == "amqps" else None,
            socket_timeout=TIMEOUT,
            stack_timeout=TIMEOUT,
            blocked_connection_timeout=TIMEOUT,
            heartbeat=0,  # the client does not answer between two calls
        )
        client = logging.getLogger("pika")
        if client.level == logging.NOTSET:
            client.setLevel(logging.CRITICAL)  # what fails is raised
        self._connection: Any = None
        self._ends: dict[int, int] = {}
        """End of each queue that has shown a message."""

    @property
    def identity(self) -> str:
        """The queues."""
        return f"rabbitmq {' '.join(self._queues)}"

    def bounds(self) -> list[Bounds]:
        """Return the bounds of each queue; its end follows from the messages of its last chunk.

        The broker's count of messages is seconds old, and too high after a removal.
        """
        found = []
        for number in range(len(self._queues)):
            last = self._read(number, "last", _CHUNK, at_once=True)
            if not last:
                found.append(Bounds(0, 0))
                continue
            self._ends[number] = last[-1].offset + 1
            first = self._read(number, "first", 1)[0]
            found.append(Bounds(first.offset, self._ends[number]))
        return found

    def offsets_at(self, when: datetime, bounds: list[Bounds]) -> list[int]:
        """Return the offsets by the broker's write time, which has whole chunks and whole seconds."""
        found = []
        for number, (_, end) in enumerate(bounds):
            message = self._read(number, when, 1, at_once=True) if end else []
            found.append(message[0].offset if message else end)
        return found

    def fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        """Fetch messages; the broker begins with a later one if ``start`` does not exist."""
        got = self._read(partition, start, min(most, stop - start), stop)
        messages = [message for message in got if message.offset < stop]
        reached = stop if len(messages) < len(got) else got[-1].offset + 1
        first = start
        if got[0].offset > start:  # a gap, or a removal
            first = max(start, self._read(partition, "first", 1)[0].offset)
        return Fetched(messages, reached, first)

    def _read(
        self,
        partition: int,
        start: int | str | datetime,
        count: int,
        stop: int = 1 << 63,
        *,
        at_once: bool = False,
    ) -> list[Message]:
        """Return ``count`` messages, or those up to ``stop``; fewer only if ``at_once`` is True.

        There are more if the broker sends a whole chunk at once. No message is acknowledged, which moves nothing in a
        stream.
        """
        queue, found = self._queues[partition], list[Message]()
        end = self._ends.get(partition, 0) if start == "last" else 0
        may_have_none = at_once and not end

        def take(_: Any, __: Any, properties: Any, body: bytes) -> None:
            offset = (properties.headers or {}).get("x-stream-offset")
            if offset is None:
                raise ConfigurationError(
                    f"The queue {queue} of {self.address} is no stream (x-queue-type: stream)."
                )
            found.append(Message(partition, int(offset), body, None, properties.headers))

        with self._channel() as channel:
            with self._answered():
                patience = _FILLED
                if may_have_none and start == "last":
                    # The broker's count may be late for new messages, and only then is it too low.
                    may_have_none = not channel.queue_declare(
                        queue, passive=True
                    ).method.message_count
                    patience = _EMPTY if may_have_none else _FILLED
                channel.basic_qos(prefetch_count=count)
                channel.basic_consume(queue, take, arguments={"x-stream-offset": start})
            until = time.monotonic() + patience
            while len(found) < count and not (found and found[-1].offset >= stop - 1):
                known, received = len(found), self._received
                self._connection.process_data_events(_QUIET)
                if len(found) > known:
                    patience = _EMPTY if at_once and not end else _FILLED
                    wait = _QUIET if end and found[-1].offset >= end - 1 else patience
                    until = time.monotonic() + wait
                elif self._received > received:  # a part of a message
                    until = max(until, time.monotonic() + patience)
                elif time.monotonic() > until:
                    break
            else:
                return found
        if at_once and (found or may_have_none):
            return found
        raise TimeoutError("the messages that it has do not come")

    @property
    def _received(self) -> int:
        """Number of bytes in whole frames from the broker so far."""
        return int(self._connection._impl.bytes_received)  # noqa: SLF001 - of no public property

    @contextlib.contextmanager
    def _channel(self) -> Iterator[Any]:
        import pika  # noqa: PLC0415 - only if there is such a source

        if self._connection is None or self._connection.is_closed:
            self._connection = pika.BlockingConnection(self._parameters)
        with self._answered():
            channel = self._connection.channel()
        try:
            yield channel
        except pika.exceptions.ChannelClosedByBroker as error:
            # The broker calls a queue that it has not started yet "down or inaccessible".
            if error.reply_code not in _REFUSED or "is down" in error.reply_text:
                raise ConnectionError(error.reply_text) from None
            raise
        finally:
            if channel.is_open:
                with contextlib.suppress(self.transient[1]), self._answered():
                    channel.close()

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        """Break the connection off if the broker does not answer; without heartbeats, the client would wait for ever."""
        from pika import exceptions  # noqa: PLC0415 - only if there is such a source

        connection = self._connection._impl  # noqa: SLF001 - as the client's own checker of heartbeats does it
        why = exceptions.AMQPHeartbeatTimeout(f"no answer within {TIMEOUT:.0f} s")
        over = connection.ioloop.call_later(
            TIMEOUT,
            lambda: connection._terminate_stream(why),  # noqa: SLF001
        )
        try:
            yield
        finally:
            connection.ioloop.remove_timeout(over)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None and self._connection.is_open:
            with contextlib.suppress(self.transient[1]), self._answered():
                self._connection.close()
        self._connection = None


def _tls(host: str) -> Any:
    import ssl  # noqa: PLC0415 - only if there is such a source

    import pika  # noqa: PLC0415

    return pika.SSLOptions(ssl.create_default_context(), host)
