"""Which fault comes when: decided before the job starts, equal for an equal seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple


class Planned(NamedTuple):
    """A fault that is to come."""

    at: float
    """Seconds since the first step, at the earliest; it also waits until the job trains again."""
    verb: str
    draw: float
    """Between 0 and 1: which of the processes that it could strike it strikes."""


def in_order(verbs: Sequence[str], seed: int) -> list[Planned]:
    """Each verb once, one after the other."""
    chance = random.Random(seed)  # noqa: S311 - a plan, not a secret
    return [Planned(0.0, verb, chance.random()) for verb in verbs]


def at_random(verbs: Sequence[str], every: float, duration: float, seed: int) -> list[Planned]:
    """One of the verbs each ``every`` seconds, for ``duration`` seconds."""
    chance = random.Random(seed)  # noqa: S311
    return [
        Planned(count * every, chance.choice(verbs), chance.random())
        for count in range(1, int(duration / every) + 1)
    ]
