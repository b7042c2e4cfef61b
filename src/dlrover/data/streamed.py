"""A stream as one worker of a job reads it: its broker, its end, and the monitoring of its progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlrover.data import services
from dlrover.data.client import ShardClient
from dlrover.data.feed import Feed
from dlrover.data.group import Group
from dlrover.data.heads import Heads
from dlrover.data.machine.spans import Spans
from dlrover.data.quota import Quota
from dlrover.data.services import ShardService
from dlrover.data.sources.stream import Message, Stream
from dlrover.spec.shards import DataSpec, Incarnation, Span


class Streamed:
    """Stream of one dataset; used by the dataset's thread."""

    def __init__(self, stream: Stream[Any], shard: int | None) -> None:
        self.stream = stream
        self._shard = shard
        self._feed, self._group = Feed(stream), Group(stream)
        self._service: ShardService | None = None
        self._client: ShardClient | None = None
        self._heads: Heads | None = None
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
        there = tuple(ends[: len(client.spec.begins)])
        client.extend(there)
        self._client, self._heads = client, Heads(self.stream, client, there)
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
        if self._heads is not None:
            self._heads.join()
        self._client = self._heads = None
        self._feed.close()
