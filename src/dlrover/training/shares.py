"""The share of the global batch that each rank computes, by its speed: decisions, without torch.

A rank's speed follows from the time it takes for its current share, without waiting for the others. New
shares are proportional to the speeds. A step also has a part that does not depend on the share. Each new
measurement contains it again, so a few changes lead to equal times, if shares can bring them about at all.
A change that does not shorten the steps is reverted.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlrover.planning.balance import Split, split_batch
from dlrover.training import batch

WORTH = 0.05
"""Minimum expected reduction of the step time for a change, as a fraction."""
SLACK = 0.02
"""Minimum measured reduction of the step time, as a fraction; otherwise the change is reverted."""
REST = 10
"""Windows without a change after a reverted one."""


class Shares:
    """The shares of one training. Every rank keeps its own copy; equal inputs keep the copies equal.

    Args:
        batch_size: samples of a global batch.
        replicas: number of ranks.
    """

    def __init__(self, batch_size: int, replicas: int) -> None:
        self._batch_size = batch_size
        self._equal = batch.equal_shares(batch_size, replicas)
        self.now = self._equal
        """Samples per rank."""
        self._before: tuple[tuple[int, ...], float] | None = None
        """Shares and seconds per step before a change that is not judged yet."""
        self._rest = 0

    def decide(self, seconds: Sequence[float]) -> str:
        """Judge the last change and perhaps choose new shares, after a window.

        Args:
            seconds: each rank's time for a step with the current shares, without waiting for other ranks.

        Returns:
            Description of the change and its reason; empty if the shares stay.
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
        """Revert the last change if the slowest rank is no faster; return the reason, or an empty string."""
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
