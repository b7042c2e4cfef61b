"""How many samples a stream still gives: tickets, which are dealt to the workers as samples are."""

from __future__ import annotations

from collections import deque

from dlrover.sharding.client import ShardClient
from dlrover.sharding.dealers import Dealer
from dlrover.sharding.spans import Spans
from dlrover.spec.shards import DataSpec, Incarnation, Span

SHARD = 100
"""Tickets that are dealt at a time, at most: who holds some that it cannot use keeps them from others."""


class Quota:
    """This worker's tickets: one for each sample that the training gets. They are all alike.

    Args:
        data: the stream's data set.
        most: samples that all workers together get, with those before.
        used: of these, what the checkpoint contains.
        dealer: whoever deals.
        rank: this worker's.
        incarnation: the data set's.
    """

    def __init__(
        self,
        data: DataSpec,
        most: int,
        used: int,
        dealer: Dealer,
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
        self._client = ShardClient(spec, dealer, rank, incarnation, before.packed())
        self._ready: deque[int] = deque()
        """Tickets for the next samples."""
        self._drawn: deque[int] = deque()
        """Tickets for samples that are read, and not yet with the training."""

    def ready(self, *, patient: bool) -> bool:
        """Whether there is a ticket for another sample; else the stream has ended for this worker.

        To be asked before one waits for the sample: it may never come.
        """
        if not self._ready:
            for span in self._client.take(patient=patient):
                self._client.claim(span)
                self._ready.extend(range(span.start, span.stop))
        return bool(self._ready)

    def draw(self) -> None:
        """Use a ticket that is ready, for a sample that is there."""
        self._drawn.append(self._ready.popleft())

    def spend(self, count: int) -> None:
        """The training has got so many samples."""
        self._client.consumed([self._used() for _ in range(count)])

    def put_back(self, count: int) -> None:
        """So many samples did not come to the training."""
        self._client.put_back([self._used() for _ in range(count)])

    def _used(self) -> Span:
        at = self._drawn.popleft()
        return Span(0, at, at + 1)

    def close(self) -> None:
        """Give back the tickets that were not used."""
        self._client.close()
