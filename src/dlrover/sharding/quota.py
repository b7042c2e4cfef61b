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
        self._next: int | None = None
        """The ticket for the next sample."""
        self._drawn: deque[int] = deque()
        """Tickets for samples that are read, and not yet with the training."""
        self.over = False
        """Whether others have the tickets that are left, if there are any."""

    def ready(self, *, patient: bool) -> bool:
        """Whether there is a ticket for another sample; else the stream has ended for this worker.

        To be asked before one waits for the sample: it may never come.
        """
        if self._next is None:
            span = self._client.take(patient=patient)
            self.over = span is None
            if span is None:
                return False
            self._next = span.start
            self._client.put_back([Span(0, span.start + 1, span.stop)])
        return True

    def draw(self) -> None:
        """Use the ticket that is ready, for a sample that is there."""
        assert self._next is not None, "nobody has asked whether there is one"
        self._drawn.append(self._next)
        self._next = None

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
        """Give back the tickets that were not used."""
        self._client.close()
