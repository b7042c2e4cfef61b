"""Reader of a broker's messages, by the spans that the master leases."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from dlrover._util import backoff
from dlrover.data.machine.spans import Spans
from dlrover.data.sources.stream import Bounds, Broker, Fetched, Message, Stream
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError
from dlrover.spec.requests.shards import MAX_NAME, DataSpec, Span

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a broker may be away."""
RETRY = 0.1, 1.0
"""Seconds until the first retry after the broker did not answer, and between later ones."""
CHUNK = 500
"""Maximum number of messages to request at a time."""
FIRST_CHUNK = 50
"""Messages to request while their size is unknown."""
FEWER = 4
"""Factor by which a retry requests fewer messages."""
CHUNK_BYTES = 16 * 1024 * 1024
"""Bytes to request at a time, estimated from the last messages."""
_DIGEST = 16
"""Digits of a hash that tells long names apart."""
Result = TypeVar("Result")


class Feed:
    """One stream, read by one thread. ``pause(seconds)`` waits and returns True if interrupted.

    ``ends``: known ends of the partitions.
    """

    def __init__(
        self,
        stream: Stream[Any],
        pause: Callable[[float], bool] | None = None,
        ends: tuple[int, ...] = (),
    ) -> None:
        self._stream, self._pause = stream, pause or threading.Event().wait
        self._broker: Broker = stream.broker()
        self._chunk = FIRST_CHUNK
        self._ends = ends
        self._known_partitions = 0

    @property
    def ended(self) -> bool:
        """True if the last ends are final."""
        return self._broker.ended

    @property
    def identity(self) -> str:
        """Name that distinguishes this stream from others in a checkpoint."""
        name = self._broker.identity
        if len(name) <= MAX_NAME:
            return name
        return f"{name[: MAX_NAME - _DIGEST - 1]} {hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]}"

    def close(self) -> None:
        """Close the connection."""
        self._broker.close()

    def found(
        self, spec: DataSpec, shard: int | None, acknowledged: Spans
    ) -> tuple[DataSpec, list[int]]:
        """Return the completed description of the dataset, and the current ends of the partitions.

        Args:
            spec: the dataset, with the begins and limits of the partitions if a checkpoint has them.
            shard: offsets in a shard, if the user set it.
            acknowledged: samples in that checkpoint.

        Raises:
            InfrastructureError: the broker cannot be reached, or now keeps another stream.
        """
        bounds = self._insist(self._broker.bounds)
        ids = self.compare(spec.source_ids, skips=self._stream.skips)
        if len(bounds) < len(spec.begins):
            raise ConfigurationError(
                f"{self._broker.address} has {len(bounds)} partitions; in the checkpoint it has"
                f" {len(spec.begins)}."
            )
        for number, ranges in acknowledged.partitions.items():
            last = max((stop for _, stop in ranges), default=0)
            if number < len(bounds) and last > bounds[number].end:
                raise InfrastructureError(
                    f"Partition {number} of {self._broker.address} ends at offset {bounds[number].end}, and the"
                    f" checkpoint has read it up to {last}: it was recreated or has lost messages."
                )
        known = len(spec.begins)
        made = msgspec.structs.replace(
            spec,
            begins=(*spec.begins, *self._begins(bounds, first_start=not known)[known:]),
            limits=self._limits(bounds, spec.limits),
            source_ids=ids,
            shard=shard or self._broker.shard(bounds),
        )
        return made, [b.end for b in bounds]

    def compare(self, known: Mapping[str, str], *, skips: bool = False) -> dict[str, str]:
        """Compare the topics or streams of the last bounds with those that the job has read; return the ids of all.

        Raises:
            InfrastructureError: one was deleted and created again; with ``skips``, a warning says so.
        """
        broker = self._broker
        for name, now in broker.source_ids.items():
            if name not in known or not broker.is_another(known[name], now):
                continue
            what = f"{name} of {broker.address} is not the one that the job has read: that was deleted, and created again"
            if not skips:
                raise InfrastructureError(
                    f"{what}. To read all of the new one, start a job that restores the model and not this data set; to"
                    " go on at the same offset, as in a copy, start again with lost='skip'."
                )
            logger.warning("%s; reading goes on at the same offset", what)
        return {**known, **broker.source_ids}

    def _begins(self, bounds: list[Bounds], *, first_start: bool) -> list[int]:
        """Return the partitions' begins; those added after the first start begin with their first message."""
        start = self._stream.start
        earliest: list[int] = self._insist(lambda: [self._broker.beginning(b) for b in bounds])
        if first_start and isinstance(start, datetime):
            first = self._offsets_at(start, bounds)
        else:
            first = [b.end if first_start and start == "latest" else b.first for b in bounds]
        return list(map(max, earliest, first))

    def _limits(self, bounds: list[Bounds], known: tuple[int, ...]) -> tuple[int, ...]:
        """Return where the partitions end for the job; empty: nowhere."""
        until = self._stream.until
        if isinstance(until, datetime):
            return tuple(self._offsets_at(until, bounds))
        return (*known, *(b.end for b in bounds[len(known) :])) if until else ()

    def _offsets_at(self, when: datetime, bounds: list[Bounds]) -> list[int]:
        found: list[int] = self._insist(lambda: self._broker.offsets_at(when, bounds))
        return [max(b.first, min(b.end, at)) for b, at in zip(bounds, found, strict=True)]

    def ends(self, begins: tuple[int, ...]) -> tuple[int, ...]:
        """Return the current ends of the partitions; ``begins``: where the job began in each of them.

        Raises:
            InfrastructureError: the broker cannot be reached, or has lost messages.
        """
        count = len(begins)
        bounds: list[Bounds] = self._insist(self._broker.bounds)
        address = self._broker.address
        if len(bounds) < count:
            raise InfrastructureError(f"{address} has lost a partition.")
        if len(bounds) > max(count, self._known_partitions):
            self._known_partitions = len(bounds)
            logger.warning(
                "%s has %d partitions by now, and the job reads %d: it reads the others, from their first"
                " message, after a restart from a checkpoint",
                address, len(bounds), count,
            )  # fmt: skip
        ends = tuple(b.end for b in bounds[:count])
        for number, (end, begin) in enumerate(zip(ends, begins, strict=True)):
            before = self._ends[number] if self._ends else 0
            if end < before or 1 < end < begin:
                raise InfrastructureError(
                    f"Partition {number} of {address} ends at offset {end}, and the job has seen {max(before, begin)}:"
                    " it was recreated or has lost messages."
                )
        self._ends = ends
        return ends

    def read(
        self, span: Span, leave_empty: Callable[[Span], None]
    ) -> Iterator[tuple[Span, Message | None]]:
        """Yield all of a span in consecutive parts; each ends with a message, or has none.

        Args:
            span: samples to read.
            leave_empty: called with empty offsets behind the span, if the broker knows them.

        Raises:
            InfrastructureError: the broker cannot be reached, or has removed messages of the span.
        """
        at = span.start
        while at < span.stop:
            start = at
            fetched = self._insist(self._fetch(span, at))
            self._adapt(fetched.messages)
            lost = start
            for message in fetched.messages:  # which were there, and may be removed by now
                lost += message.offset == lost
            removed = min(fetched.first, fetched.stop, span.stop)
            if removed > lost:
                self._lose(span.partition, lost, removed)
            for message in fetched.messages:
                yield Span(span.partition, at, message.offset + 1), message
                at = message.offset + 1
            if fetched.stop > span.stop:
                leave_empty(Span(span.partition, span.stop, fetched.stop))
            stop = min(fetched.stop, span.stop)
            if stop > at:
                yield Span(span.partition, at, stop), None
                at = stop

    def _fetch(self, span: Span, start: int) -> Callable[[], Fetched]:
        def fetch() -> Fetched:
            most = min(self._chunk, CHUNK)
            try:
                return self._broker.fetch(span.partition, start, span.stop, most)
            except self._broker.transient:
                # A broker may break off what is too large for it or for the line.
                self._chunk = max(1, most // FEWER)
                raise

        return fetch

    def _adapt(self, messages: list[Message]) -> None:
        """Adapt the number of messages per request to their size."""
        if messages:
            average = sum(map(_size, messages)) / len(messages)
            fitting = int(CHUNK_BYTES / max(1, average))
            self._chunk = max(1, min(2 * self._chunk, CHUNK, fitting))

    def _lose(self, partition: int, start: int, stop: int) -> None:
        what = (
            f"Messages with offsets {start} to {stop - 1} of partition {partition} of {self._broker.address} were"
            " removed before they were read"
        )
        if not self._stream.skips:
            raise InfrastructureError(
                f"{what}; keep them for longer in the broker, or go on without them with lost='skip'."
            )
        logger.warning("%s; they are skipped", what)

    def _insist(self, call: Callable[[], Result]) -> Result:
        """Ask the broker until it answers, up to `PATIENCE` seconds."""
        broker = self._broker
        until, delays = time.monotonic() + PATIENCE, backoff.delays(*RETRY)
        warned = False
        while True:
            try:
                return call()
            except DLRoverError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a client raises
                why = broker.address.scrubbed(error)
                if not isinstance(error, broker.transient) or isinstance(error, broker.hopeless):
                    raise InfrastructureError(f"{broker.address} cannot be read: {why}") from None
                if time.monotonic() > until:
                    raise InfrastructureError(
                        f"{broker.address} did not answer for {PATIENCE:.0f} s: {why}"
                    ) from None
                if not warned:
                    logger.warning("%s does not answer; retrying: %s", broker.address, why)
                warned = True
            broker.close()
            if self._pause(next(delays)):
                raise InfrastructureError(f"{broker.address} is not read any more.")


def _size(message: Message) -> int:
    """Return the approximate bytes of a message."""
    value = message.value
    parts = value.values() if isinstance(value, dict) else [value]
    return sum(len(part) for part in parts if isinstance(part, bytes))
