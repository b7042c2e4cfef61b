"""A stream as one worker of a job reads it: its broker, its end, and the monitoring of its progress."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dlrover.data import services
from dlrover.data.client import CLOSE_WAIT, ShardClient
from dlrover.data.feed import Feed
from dlrover.data.machine.spans import Spans
from dlrover.data.machine.state import began, merged
from dlrover.data.services import ShardService
from dlrover.data.sources.stream import Message, Stream
from dlrover.errors import DLRoverError
from dlrover.spec.requests.shards import DataSpec, Incarnation, LookShards, ShardReply, Span

logger = logging.getLogger(__name__)

ENDS_INTERVAL = 0.3
"""Seconds between two questions."""
TICKETS = 100
"""Maximum number of tickets per lease; tickets that a worker cannot use are missing elsewhere."""


class StreamReader:
    """Stream of one dataset; used by the dataset's thread."""

    def __init__(self, stream: Stream[Any], shard: int | None) -> None:
        self.stream = stream
        self._shard = shard
        self._feed, self._group = Feed(stream), ConsumerGroup(stream)
        self._service: ShardService | None = None
        self._client: ShardClient | None = None
        self._ends: EndOffsetPoller | None = None
        self._quota: Quota | None = None
        self.samples_before = 0
        """Samples in the checkpoint."""
        self.samples = 0
        """Samples that this worker has handed to the training since."""

    @property
    def identity(self) -> str:
        """Name that distinguishes this stream from others in a checkpoint."""
        return self._feed.identity

    def open(self, spec: DataSpec, base: bytes, incarnation: Incarnation) -> ShardClient:
        """Find the current ends of the stream, and return a client."""
        self._service = service = services.connect()
        found, ends = self._feed.found(spec, self._shard, Spans.unpacked(base))
        client = ShardClient(
            found, service, services.world()[0], incarnation, base, self.stream.ahead
        )
        self._client = client
        ids = self._feed.compare(client.spec.source_ids, skips=self.stream.skips)
        there = tuple(ends[: len(client.spec.begins)])
        client.extend(there)
        self._ends = EndOffsetPoller(self.stream, client, there, ids)
        return client

    def read(self, span: Span) -> Iterator[tuple[Span, Message | None]]:
        """Yield all of a span in consecutive parts; each ends with a message, or has none."""
        return self._feed.read(span, self._leave_empty)

    def _leave_empty(self, gap: Span) -> None:
        if self._client is not None:  # else the rest of a closed dataset is being read
            self._client.leave_empty(gap)

    # ---- the end after ``max_samples``

    def goes_on(self, spec: DataSpec, incarnation: Incarnation, *, patient: bool) -> bool:
        """Return whether ``max_samples`` leaves a sample for this worker; call this before waiting for it."""
        most = self.stream.max_samples
        if most is None or self._service is None:  # asked again when the stream is open
            return True
        if self._quota is None:
            service, rank = self._service.another(), services.world()[0]
            self._quota = Quota(spec, most, self.samples_before, service, rank, incarnation)
        return self._quota.ready(patient=patient)

    def draw(self) -> None:
        """Note that a sample for the training has been read."""
        if self._quota is not None:
            self._quota.draw()

    def acknowledge(self, count: int) -> None:
        """Mark ``count`` samples as handed to the training."""
        self.samples += count
        if self._quota is not None:
            self._quota.acknowledge(count)

    def leave_all(self) -> None:
        """Note that no sample that was read and is not acknowledged reached the training."""
        if self._quota is not None:
            self._quota.leave_all()

    def put_back(self, count: int) -> None:
        """Note that ``count`` samples were read and did not reach the training."""
        if self._quota is not None:
            self._quota.put_back(count)

    # ---- checkpoints

    def restart(self, samples: int) -> None:
        """Restart from a checkpoint that contains ``samples`` samples."""
        self._service = None
        self.samples_before, self.samples = samples, 0

    @property
    def has_group(self) -> bool:
        """True if a group follows the content of stored checkpoints."""
        return bool(self._group)

    def commit(self, states: Sequence[Mapping[str, Any]], spec: DataSpec) -> None:
        """Commit the content of a stored checkpoint to the group; errors are logged."""
        self._group.commit(states, spec, self._service)

    # ---- the end

    def close(self) -> None:
        """Return leased samples, and close the connection to the broker."""
        if self._quota is not None:
            self._quota.close()
            self._quota = None
        if self._client is not None:
            self._client.close()
        if self._ends is not None:
            self._ends.join()
        self._client = self._ends = None
        self._feed.close()


class EndOffsetPoller:
    """Reporter of the partitions' ends to a client until that closes; ``ends``, ``ids``: those at its opening."""

    def __init__(
        self, stream: Stream[Any], client: ShardClient, ends: tuple[int, ...], ids: dict[str, str]
    ) -> None:
        self._client, self._ids = client, ids
        self._feed = Feed(stream, client.wait_for_close, ends)
        self._begins = client.spec.begins
        self._thread = threading.Thread(target=self._run, name="dlrover-ends", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._client.wait_for_close(ENDS_INTERVAL):
                if self._client.wait_for_need(ENDS_INTERVAL):
                    ends = self._feed.ends(self._begins)
                    self._feed.compare(self._ids)
                    self._client.extend(ends, final=self._feed.ended)
        except DLRoverError as error:
            self._client.break_off(error)
        finally:
            self._feed.close()

    def join(self) -> None:
        """Wait for the end of a closed client's thread."""
        self._thread.join(CLOSE_WAIT)


class Quota:
    """This worker's tickets: one for each sample that the training gets. Tickets are interchangeable.

    Args:
        data: the stream's dataset.
        most: samples that all workers together get, including those before the start.
        used: the part of them that the checkpoint contains.
        service: the service of the tickets.
        rank: this worker's rank.
        incarnation: the dataset's incarnation.
    """

    def __init__(
        self,
        data: DataSpec,
        most: int,
        used: int,
        service: ShardService,
        rank: int,
        incarnation: Incarnation,
    ) -> None:
        spec = DataSpec(
            name=f"{data.name} (max_samples)",
            size=most,
            shard=max(1, min(TICKETS, most // 1000)),
            timeout=data.timeout,
        )
        before = Spans([Span(0, 0, min(used, most))])
        self._client = ShardClient(spec, service, rank, incarnation, before.packed())
        self._ready: deque[int] = deque()
        """Tickets for the next samples."""
        self._drawn: deque[int] = deque()
        """Tickets for samples that are read but not yet handed to the training."""

    def ready(self, *, patient: bool) -> bool:
        """Return whether there is a ticket for another sample; if not, the stream has ended for this worker.

        Call this before waiting for the sample, which may never come.
        """
        if not self._ready:
            for span in self._client.take(patient=patient):
                self._client.claim(span)
                self._ready.extend(range(span.start, span.stop))
        return bool(self._ready)

    def draw(self) -> None:
        """Use a ready ticket for a sample that has been read."""
        self._drawn.append(self._ready.popleft())

    def acknowledge(self, count: int) -> None:
        """Mark ``count`` samples as handed to the training."""
        self._client.acknowledge([self._used() for _ in range(count)])

    def put_back(self, count: int) -> None:
        """Return the tickets of ``count`` samples that did not reach the training."""
        self._client.put_back([self._used() for _ in range(count)])

    def leave_all(self) -> None:
        """Return the tickets of all samples that did not reach the training."""
        self.put_back(len(self._drawn))

    def _used(self) -> Span:
        at = self._drawn.popleft()
        return Span(0, at, at + 1)

    def close(self) -> None:
        """Return the unused tickets."""
        self._client.close()


# ---- monitoring


class ConsumerGroup:
    """Consumer group in a stream's address. Committed offsets are never read back."""

    def __init__(self, stream: Stream[Any]) -> None:
        self._stream = stream
        self._name = stream.broker().group
        self._failing = False

    def __bool__(self) -> bool:
        return bool(self._name)

    def commit(
        self, states: Sequence[Mapping[str, Any]], spec: DataSpec, service: ShardService | None
    ) -> None:
        """Commit the offsets of a checkpoint; log errors, once until a commit succeeds again.

        Args:
            states: states of all ranks, as in the checkpoint.
            spec: the dataset.
            service: source of the skipped samples, which appear in no checkpoint; None if nothing was read.
        """
        broker = self._stream.broker()
        try:
            skipped = _skipped(spec.name, service) if service else []
            offsets = offsets_of(states, spec, skipped, broker.is_empty)
            if not offsets:
                return  # no worker had begun to read
            broker.commit(offsets)
        except Exception as error:  # noqa: BLE001 - whatever a client raises: training goes on
            if not self._failing:
                logger.warning(
                    "The checkpoint's offsets could not be committed to the group %s of %s; training goes on: %s",
                    self._name, broker.address, broker.address.scrubbed(error),
                )  # fmt: skip
            self._failing = True
        else:
            logger.info("The group %s of %s is at %s", self._name, broker.address, offsets)
            self._failing = False
        finally:
            broker.close()


def offsets_of(
    states: Sequence[Mapping[str, Any]],
    spec: DataSpec,
    skipped: Iterable[Span],
    is_empty: Callable[[Span], bool],
) -> list[int]:
    """Return, by partition, the first offset that is neither in a checkpoint nor skipped.

    Gaps without a message count as read: the worker that has leased one may not come to it any more.
    """
    acknowledged, _ = merged(states, spec)
    for span in skipped:
        acknowledged.add(span)
    offsets = []
    for number, begin in enumerate(began(states).begins):
        start, stop = acknowledged.of(number).gap(begin)
        while stop is not None and is_empty(Span(number, start, stop)):
            start, stop = acknowledged.of(number).gap(stop)
        offsets.append(start)
    return offsets


def _skipped(name: str, service: ShardService) -> list[Span]:
    asking = service.another()
    try:
        reply = asking.ask(LookShards(name))
        return [what.span for what in reply.skipped] if isinstance(reply, ShardReply) else []
    finally:
        asking.close()
