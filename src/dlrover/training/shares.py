"""The share of the global batch that each rank computes, by its speed: decisions, without torch.

A rank's speed follows from the time it takes for its current share, without waiting for the others. New
shares are proportional to the speeds. A step also has a part that does not depend on the share. Each new
measurement contains it again, so a few changes lead to equal times, if shares can bring them about at all.
A change that does not shorten the steps is reverted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
        each = [s / n for s, n in zip(seconds, self.now, strict=True)]
        wanted, reason = self._split(each)
        if _step(wanted, each) > (1 - WORTH) * slowest:
            return ""
        self._before, self.now = (self.now, slowest), wanted
        return reason

    def _split(self, each: Sequence[float]) -> tuple[tuple[int, ...], str]:
        """Return the shares for seconds per sample, and why; equal ones where others would gain little."""
        shares = by_speed(self._batch_size, each)
        gain = 1 - _step(shares, each) / _step(self._equal, each)
        if gain < WORTH:
            return (
                self._equal,
                f"equal shares: a split by speed gains {max(gain, 0.0):.1%} of a step",
            )
        slowest = max(range(len(each)), key=lambda rank: each[rank])
        return shares, (
            f"rank {slowest} is the slowest and takes {shares[slowest]} of {self._batch_size} samples instead of "
            f"{self._equal[slowest]}: steps get {gain:.0%} shorter than with equal shares"
        )

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


def by_speed(size: int, each: Sequence[float]) -> tuple[int, ...]:
    """Divide a batch so that all ranks need about the same time, and each has a sample.

    Each next sample goes to the rank that would finish it first, which makes the slowest one as fast as whole
    samples allow.

    Args:
        size: Samples of the batch, at least one for each rank.
        each: Seconds per sample of each rank.
    """
    rate = sum(1 / seconds for seconds in each)
    shares = [max(1, math.floor(size / seconds / rate)) for seconds in each]
    ranks = range(len(each))
    while sum(shares) > size:
        shares[max((r for r in ranks if shares[r] > 1), key=lambda r: shares[r] * each[r])] -= 1
    while sum(shares) < size:
        shares[min(ranks, key=lambda r: (shares[r] + 1) * each[r])] += 1
    return tuple(shares)


def _step(shares: Sequence[int], each: Sequence[float]) -> float:
    """Return the seconds of a step: those of its slowest rank."""
    return max(share * seconds for share, seconds in zip(shares, each, strict=True))
