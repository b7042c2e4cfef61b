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
        name: of the stream's data set.
        most: samples that all workers together get, with those before.
        used: of these, what the checkpoint contains.
        dealer: whoever deals.
        rank: this worker's.
        incarnation: the data set's.
    """

    def __init__(
        self,
        name: str,
        most: int,
        used: int,
        dealer: Dealer,
        rank: int,
        incarnation: Incarnation,
    ) -> None:
        spec = DataSpec(
            name=f"{name} (max_samples)", size=most, shard=max(1, min(SHARD, most // 1000))
        )
        before = Spans([Span(0, 0, min(used, most))])
        self._client = ShardClient(spec, dealer, rank, incarnation, before.packed())
        self._drawn: deque[int] = deque()
        """For samples that are read, and not yet with the training."""

    def draw(self, *, patient: bool) -> bool:
        """Take a ticket for the next sample; False: there is none, the stream has ended for this worker."""
        span = self._client.take(patient=patient)
        if span is None:
            return False
        self._drawn.append(span.start)
        self._client.put_back([Span(0, span.start + 1, span.stop)])
        return True

    def spend(self, count: int) -> None:
        """The training has got so many samples."""
        for _ in range(count):
            at = self._drawn.popleft()
            self._client.consumed(0, at, at + 1)

    def put_back(self, count: int) -> None:
        """So many samples did not come to the training."""
        for _ in range(count):
            at = self._drawn.popleft()
            self._client.put_back([Span(0, at, at + 1)])

    def close(self) -> None:
        """Give back what was not used."""
        self._client.close()
