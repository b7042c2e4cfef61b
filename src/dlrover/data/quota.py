"""Limit on the samples of a stream: tickets, which are leased to the workers like samples."""

from __future__ import annotations

from collections import deque

from dlrover.data.client import ShardClient
from dlrover.data.machine.spans import Spans
from dlrover.data.services import ShardService
from dlrover.spec.shards import DataSpec, Incarnation, Span

SHARD = 100
"""Maximum number of tickets per lease; tickets that a worker cannot use are missing elsewhere."""


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
            shard=max(1, min(SHARD, most // 1000)),
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

    def _used(self) -> Span:
        at = self._drawn.popleft()
        return Span(0, at, at + 1)

    def close(self) -> None:
        """Return the unused tickets."""
        self._client.close()
