"""Delays between attempts."""

from __future__ import annotations

import random
from collections.abc import Iterator

JITTER = 0.25
"""Share by which a delay may be shortened at random, so that many clients do not retry at the same time."""


def delays(
    first: float,
    most: float,
    factor: float = 2.0,
    jitter: float = JITTER,
    chance: random.Random | None = None,
) -> Iterator[float]:
    """Yield seconds to wait before each retry, endlessly.

    Args:
        first: The first delay.
        most: The maximum, which holds from then on.
        factor: Growth per attempt.
        jitter: Maximum share by which each delay is shortened at random.
        chance: Source of the randomness; None: the module `random`.
    """
    draw = chance.random if chance is not None else random.random
    delay = min(first, most)
    while True:
        yield delay * (1 - jitter * draw())
        delay = min(delay * factor, most)
