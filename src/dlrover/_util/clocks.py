"""Clocks for journals."""

from __future__ import annotations

import time


class Clock:
    """Wall clock in seconds that never runs backwards: the wall time at the start plus monotonic time."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        """Return the seconds since the epoch."""
        return self._offset + time.monotonic()
