"""Rate limit in bytes per second."""

from __future__ import annotations


class TokenBucket:
    """Rate limiter that never lets the sender get more than ``burst`` bytes ahead of the rate.

    Args:
        rate: bytes per second.
        burst: bytes that may be sent at once after a pause.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = float("-inf")

    def take(self, nbytes: int, now: float) -> float:
        """Count ``nbytes``; return the seconds to wait before sending them. ``now`` is in seconds."""
        if self._at > float("-inf"):
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        self._level -= nbytes
        return max(0.0, -self._level / self._rate)
