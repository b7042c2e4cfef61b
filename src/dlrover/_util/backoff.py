"""Delays between attempts."""

from __future__ import annotations

import random
from collections.abc import Iterator

JITTER = 0.25
"""Share by which a delay may be shortened at random, so that many clients do not retry at the same time."""


def delays(
    first: float, most: float, factor: float = 2.0, jitter: float = JITTER
) -> Iterator[float]:
    """Yield seconds to wait before each retry, endlessly.

    Args:
        first: The first delay.
        most: The maximum, which holds from then on.
        factor: Growth per attempt.
        jitter: Maximum share by which each delay is shortened at random.
    """
    delay = min(first, most)
    while True:
        yield delay * (1 - jitter * random.random())  # noqa: S311 - no secret
        delay = min(delay * factor, most)
