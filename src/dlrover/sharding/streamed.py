"""A stream as one worker of a job reads it: what its broker keeps, when it ends, and who watches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlrover.sharding import dealers
from dlrover.sharding.client import ShardClient
from dlrover.sharding.dealers import Dealer
from dlrover.sharding.feed import Feed
from dlrover.sharding.group import Group
from dlrover.sharding.heads import Heads
from dlrover.sharding.quota import Quota
from dlrover.sharding.sources.stream import Message, Stream
from dlrover.sharding.spans import Spans
from dlrover.spec.shards import DataSpec, Incarnation, Span


class Streamed:
    """Belongs to one data set, and to its thread."""

    def __init__(self, stream: Stream[Any], shard: int | None) -> None:
        self.stream = stream
        self._shard = shard
        self._feed, self._group = Feed(stream), Group(stream)
        self._dealer: Dealer | None = None
        self._client: ShardClient | None = None
        self._heads: Heads | None = None
        self._quota: Quota | None = None
        self.samples_before = 0
        """Samples that the checkpoint contains."""
        self.samples = 0
        """Samples that this worker has handed to the training since."""

    @property
    def identity(self) -> str:
        """What tells this stream from others in a checkpoint."""
        return self._feed.identity

    def open(self, spec: DataSpec, base: bytes, incarnation: Incarnation) -> ShardClient:
        """A client, for which it is found out how far the stream is."""
        self._dealer = dealer = dealers.connect()
        found, ends = self._feed.found(spec, self._shard, Spans.unpacked(base))
        client = ShardClient(
            found, dealer, dealers.world()[0], incarnation, base, self.stream.ahead
        )
        there = tuple(ends[: len(client.spec.begins)])
        client.extend(there)
        self._client, self._heads = client, Heads(self.stream, client, there)
        return client

    def read(self, span: Span) -> Iterator[tuple[Span, Message | None]]:
        """All of a span, in parts that follow each other: each ends with a message, or has none."""
        return self._feed.read(span, self._leave_empty)

    def _leave_empty(self, gap: Span) -> None:
        if self._client is not None:  # else the rest is read of a data set that was closed
            self._client.leave_empty(gap)

    # ---- the end after so many samples

    def goes_on(self, spec: DataSpec, incarnation: Incarnation, *, patient: bool) -> bool:
        """Whether ``max_samples`` leave this worker another one. To be asked before it waits for one."""
        most = self.stream.max_samples
        if most is None or self._dealer is None:  # it is asked again when the stream is open
            return True
        if self._quota is None:
            dealer, rank = self._dealer.another(), dealers.world()[0]
            self._quota = Quota(spec, most, self.samples_before, dealer, rank, incarnation)
        return self._quota.ready(patient=patient)

    def draw(self) -> None:
        """A sample is read that the training may get."""
        if self._quota is not None:
            self._quota.draw()

    def spend(self, count: int) -> None:
        """The training has got so many samples."""
        self.samples += count
        if self._quota is not None:
            self._quota.spend(count)

    def put_back(self, count: int) -> None:
        """So many samples that are read did not come to the training."""
        if self._quota is not None:
            self._quota.put_back(count)

    # ---- checkpoints

    def restart(self, samples: int) -> None:
        """Begin again, with a checkpoint that contains so many samples."""
        self._dealer = None
        self.samples_before, self.samples = samples, 0

    @property
    def has_group(self) -> bool:
        """Whether somebody is to be told what stored checkpoints contain."""
        return bool(self._group)

    def commit(self, states: Sequence[Mapping[str, Any]], spec: DataSpec) -> None:
        """Tell the group what a stored checkpoint contains; what goes wrong is logged."""
        self._group.commit(states, spec, self._dealer)

    # ---- the end

    def close(self) -> None:
        """Give back what was taken, and let the broker go."""
        if self._quota is not None:
            self._quota.close()
            self._quota = None
        if self._client is not None:
            self._client.close()
        if self._heads is not None:
            self._heads.join()
        self._client = self._heads = None
        self._feed.close()
