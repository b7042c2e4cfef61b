"""What a broker keeps, read by the spans that the master deals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError
from dlrover.sharding.sources.stream import Bounds, Broker, Message, Stream
from dlrover.sharding.spans import Spans
from dlrover.spec.shards import DataSpec, Span

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a broker may be away."""
PAUSE = 0.5
"""Seconds between two attempts to reach it."""
CHUNK = 500
"""Messages that are asked for at a time."""
Result = TypeVar("Result")


class Feed:
    """One stream, read by one thread. ``pause(seconds)`` waits, and is true if that was interrupted."""

    def __init__(self, stream: Stream[Any], pause: Callable[[float], bool] | None = None) -> None:
        self._stream, self._pause = stream, pause or threading.Event().wait
        self._broker: Broker = stream.broker()

    @property
    def identity(self) -> str:
        """What tells this stream from others in a checkpoint."""
        return self._broker.identity

    def close(self) -> None:
        """Let the connection go."""
        self._broker.close()

    def found(self, spec: DataSpec, shard: int | None, done: Spans) -> tuple[DataSpec, list[int]]:
        """What is to be read, and where the partitions end now.

        Args:
            spec: with where the partitions began and will end, if a checkpoint says so.
            shard: offsets in a shard, if the user says so.
            done: what that checkpoint contains.

        Raises:
            InfrastructureError: the broker cannot be reached, or keeps another stream by now.
        """
        bounds = self._insist(self._broker.bounds)
        if len(bounds) < len(spec.begins):
            raise ConfigurationError(
                f"{self._broker.address} has {len(bounds)} partitions; in the checkpoint it has"
                f" {len(spec.begins)}."
            )
        for number, ranges in done.lanes.items():
            last = max((stop for _, stop in ranges), default=0)
            if number < len(bounds) and last > bounds[number].end:
                raise InfrastructureError(
                    f"Partition {number} of {self._broker.address} ends at offset {bounds[number].end}, and the"
                    f" checkpoint has read it up to {last}: it was made anew, or has lost messages."
                )
        known = len(spec.begins)
        new = [b.end if self._stream.latest and not known else b.first for b in bounds[known:]]
        ends = [b.end for b in bounds]
        limits = (*spec.limits, *ends[len(spec.limits) :]) if self._stream.ends else ()
        made = msgspec.structs.replace(
            spec,
            begins=(*spec.begins, *new),
            limits=limits,
            shard=shard or self._broker.shard(bounds),
        )
        return made, ends

    def ends(self, count: int) -> tuple[int, ...]:
        """Where the first ``count`` partitions end now.

        Raises:
            InfrastructureError: the broker cannot be reached.
        """
        bounds: list[Bounds] = self._insist(self._broker.bounds)
        if len(bounds) < count:
            raise InfrastructureError(f"{self._broker.address} has lost a partition.")
        return tuple(b.end for b in bounds[:count])

    def read(self, span: Span) -> Iterator[tuple[Span, Message | None]]:
        """All of a span, in parts that follow each other: each ends with a message, or has none.

        Raises:
            InfrastructureError: the broker cannot be reached, or has removed messages of the span.
        """
        at = span.start
        while at < span.stop:
            start = at
            fetched = self._insist(lambda: self._broker.fetch(span.lane, at, span.stop, CHUNK))  # noqa: B023
            if fetched.first > start:
                self._lose(span.lane, start, min(fetched.first, span.stop))
            for message in fetched.messages:
                yield Span(span.lane, at, message.offset + 1), message
                at = message.offset + 1
            if fetched.stop > at:
                yield Span(span.lane, at, fetched.stop), None
                at = fetched.stop

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
        """Ask the broker until it answers, for as long as it may be away."""
        broker = self._broker
        until = time.monotonic() + PATIENCE
        told = False
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
                if not told:
                    logger.warning(
                        "%s does not answer, and is asked again: %s", broker.address, why
                    )
                told = True
            broker.close()
            if self._pause(PAUSE):
                raise InfrastructureError(f"{broker.address} is not read any more.")
