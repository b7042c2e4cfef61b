"""Schedule of faults: decided before the job starts, and equal for equal seeds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple


class Planned(NamedTuple):
    """A scheduled fault."""

    at: float
    """Least seconds since the first step; the fault also waits until the job trains again."""
    verb: str
    draw: float
    """Number between 0 and 1 that selects the target among the possible ones."""


def in_order(verbs: Sequence[str], seed: int) -> list[Planned]:
    """Schedule each verb once, one after the other."""
    chance = random.Random(seed)  # noqa: S311 - a plan, not a secret
    return [Planned(0.0, verb, chance.random()) for verb in verbs]


def at_random(verbs: Sequence[str], every: float, duration: float, seed: int) -> list[Planned]:
    """Schedule a random verb every ``every`` seconds, for ``duration`` seconds."""
    chance = random.Random(seed)  # noqa: S311
    return [
        Planned(count * every, chance.choice(verbs), chance.random())
        for count in range(1, int(duration / every) + 1)
    ]
