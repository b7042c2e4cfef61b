"""Delays between attempts."""

from __future__ import annotations

import random
from collections.abc import Iterator

JITTER = 0.25
"""Share by which a delay may be shortened at random, so that many clients do not retry at the same time."""


def delays(first: float, most: float, chance: random.Random | None = None) -> Iterator[float]:
    """Yield seconds to wait before each retry, endlessly: each time twice as many, and some less at random.

    Args:
        first: The first delay.
        most: The maximum, which holds from then on.
        chance: Source of the randomness; None: the module `random`.
    """
    draw = chance.random if chance is not None else random.random
    delay = min(first, most)
    while True:
        yield delay * (1 - JITTER * draw())
        delay = min(2 * delay, most)
