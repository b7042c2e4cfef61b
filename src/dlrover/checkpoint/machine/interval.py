"""The choice of save intervals, to memory and to storage, from the cost of saves and the failure rate.

Daly's interval loses the least time to saves and to repeated steps (J. Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps", 2006). The interval used is never so short that saves exceed a
given share of the training time, and a step is stored only when the previous one is durable (the bounds of
CheckFreq, FAST 2021).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Literal, NamedTuple

MAX_OVERHEAD = 0.035
"""Share of the training time that saves may take, as in CheckFreq."""
HOURS_BETWEEN_FAILURES = 54 * 24 * 16384 / 419
"""For one rank: Llama 3's training had 419 unexpected interruptions in 54 days on 16,384 GPUs."""
NODE_LOSSES = 0.1
"""Assumed share of failures that also lose a node's memory."""
WARM_UP = 10
"""Saves that are measured before an interval is picked."""
REMEMBERED = 50
"""Latest measurements of each kind that count."""


def daly(cost: float, between_failures: float) -> float:
    """Return the best time between two checkpoints, in seconds.

    Args:
        cost: seconds that one checkpoint takes.
        between_failures: mean seconds between two failures.
    """
    if cost >= 2 * between_failures:
        return between_failures
    ratio = cost / (2 * between_failures)
    young = math.sqrt(2 * cost * between_failures)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


class Costs(NamedTuple):
    """Measured times, in seconds."""

    step: float
    """One training step."""
    memory: float
    """Time that a save to memory blocks the training."""
    storage: float
    """Time until a save to storage is durable; it does not block the training."""


class Interval(NamedTuple):
    """Steps between two saves."""

    memory: int
    storage: int

    def sentence(self, costs: Costs) -> str:
        """Return a sentence with the choice and its reasons."""
        share = costs.memory / (self.memory * costs.step)
        return (
            f"Saving to memory every {self.memory} steps ({share:.1%} of the time) and to storage every"
            f" {self.storage} ({self.storage * costs.step:.0f} s): a step takes {costs.step:.3g} s, a save"
            f" to memory {costs.memory:.3g} s, one to storage {costs.storage:.3g} s."
        )


def advise(costs: Costs, between_failures: float) -> Interval:
    """Choose how often to save.

    Args:
        costs: the measured times, of the worst rank.
        between_failures: mean seconds between two failures of the job.
    """
    cost = max(costs.memory, 1e-6)
    least = cost / MAX_OVERHEAD
    memory = max(1, round(max(daly(cost, between_failures), least) / costs.step))
    losses = between_failures / NODE_LOSSES
    best = max(daly(cost, losses), least, costs.storage)
    storage = max(1, math.ceil(best / costs.step / memory)) * memory
    return Interval(memory, storage)


Do = Literal["nothing", "memory", "storage"]


class Auto:
    """Automatic interval, chosen from measurements and chosen again at each save to storage.

    All ranks must call `ask` in the same order, and `settle` with the same costs.
    """

    def __init__(self, between_failures: float) -> None:
        self._between_failures = between_failures
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._memory: deque[float] = deque(maxlen=REMEMBERED)
        self._storage: deque[float] = deque(maxlen=REMEMBERED)
        self._last: float | None = None
        self._asked = 0
        self.interval: Interval | None = None

    def ask(self, now: float) -> Do:
        """Return what to do at the end of a step, at ``now`` (seconds of a monotonic clock)."""
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now
        self._asked += 1
        if self.interval is None:
            return "storage" if self._asked == 1 else "memory"
        if self._asked % self.interval.storage == 0:
            return "storage"
        return "memory" if self._asked % self.interval.memory == 0 else "nothing"

    @property
    def due(self) -> bool:
        """True if it is time to `settle`: at the end of the warm-up, and at each save to storage."""
        if self.interval is None:
            return self._asked >= WARM_UP
        return self._asked % self.interval.storage == 0

    def saved(self, seconds: float, now: float) -> None:
        """Note that a save blocked the training for ``seconds`` and ended at ``now``."""
        self._memory.append(seconds)
        self._last = now

    def stored(self, seconds: float) -> None:
        """Note that a save to storage was durable after ``seconds``."""
        self._storage.append(seconds)

    @property
    def costs(self) -> Costs:
        """The median costs of this rank so far."""
        step, memory, storage = (
            statistics.median(values) if values else 0.0
            for values in (self._steps, self._memory, self._storage)
        )
        return Costs(max(step, 1e-6), memory, storage)

    def settle(self, costs: Costs) -> Interval | None:
        """Pick an interval by the costs of the worst rank; return None if it stays the same."""
        picked = advise(costs, self._between_failures)
        if picked == self.interval:
            return None
        self.interval = picked
        return picked
