"""How much of the global batch each rank takes, by its speed: decisions, without torch.

A rank's speed is known from what it took for the share that it has, without waiting for the others. The
next shares are in proportion to the speeds. A step also has a part that does not depend on the share; what
is measured with the next shares contains it again, so that a few such steps lead to equal times, if shares
can bring them about at all. If a change does not make the steps shorter it is taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlrover.elastic import batch
from dlrover.planning.balance import Split, split_batch

WORTH = 0.05
"""Shares stay while others would make a step shorter by less than this."""
SLACK = 0.02
"""A change must make the steps shorter by this, or it is taken back."""
REST = 10
"""Windows without a change after one that was taken back."""


class Shares:
    """The shares of one training. Each rank has one, and all get the same figures: so all agree.

    Args:
        batch_size: samples of a global batch.
        replicas: ranks.
    """

    def __init__(self, batch_size: int, replicas: int) -> None:
        self._batch_size = batch_size
        self._equal = batch.equal_shares(batch_size, replicas)
        self.now = self._equal
        """Samples of each rank."""
        self._before: tuple[tuple[int, ...], float] | None = None
        """What a change that is not judged yet has replaced: the shares, and the seconds of a step with them."""
        self._rest = 0

    def decide(self, seconds: Sequence[float]) -> str:
        """After a window: perhaps other shares.

        Args:
            seconds: of a step with the present shares, of each rank, without waiting for the others.

        Returns:
            What was changed, and why, in words; empty: the shares stay.
        """
        slowest = max(seconds)
        taken_back = self._judged(slowest)
        if taken_back or self._rest:
            self._rest -= not taken_back
            return taken_back
        each = {
            _name(rank): s / n for rank, (s, n) in enumerate(zip(seconds, self.now, strict=True))
        }
        split = split_batch(self._batch_size, each)
        wanted = self._shares_of(split)
        expected = max(n * each[_name(rank)] for rank, n in enumerate(wanted))
        if expected > (1 - WORTH) * slowest:
            return ""
        self._before, self.now = (self.now, slowest), wanted
        return split.reason

    def _judged(self, slowest: float) -> str:
        """Take the last change back if the slowest rank is no faster with it; what to say then."""
        if self._before is None:
            return ""
        (shares, before), self._before = self._before, None
        if slowest <= (1 - SLACK) * before:
            return ""
        self.now, self._rest = shares, REST
        return (
            f"those before are back, because with the new ones the slowest rank took {slowest:.3g} s for a step,"
            f" and {before:.3g} s before"
        )

    def _shares_of(self, split: Split) -> tuple[int, ...]:
        if not split.gain:
            return self._equal
        return tuple(split.shares[_name(rank)] for rank in range(len(self._equal)))


def _name(rank: int) -> str:
    return f"rank {rank}"
