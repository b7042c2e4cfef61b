"""Which nodes will run out of memory soon, by how their use has grown in the running round."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dlrover.planning.memory import MemoryAdvice, MemorySample, prevent_oom
from dlrover.spec.usage import NodeUsage

HORIZON = 1800.0
"""Seconds for which a node's memory must last. Nearer than that it is told, and more is ordered."""
SAMPLES = 120
"""Latest looks at a node that count."""
LEAST = 12
"""Looks that a forecast needs: a program fills its memory when it begins."""
MOST_GROWTH = 8
"""How many times its present memory a node may be ordered with."""


@dataclass
class MemoryWatch:
    """The memory of a job's nodes in one round. Times are seconds."""

    samples: dict[int, deque[MemorySample]] = field(default_factory=dict)
    #: until when nothing more is said of a node
    told: dict[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        """A new round: the workers begin anew, and their memory with them."""
        self.samples.clear()

    def note(self, node: int, usage: NodeUsage, now: float) -> MemoryAdvice | None:
        """Take in a look at a node whose workers train; what it needs, if it will not have enough."""
        known = self.samples.setdefault(node, deque(maxlen=SAMPLES))
        known.append(MemorySample(now, usage.memory))
        if len(known) < LEAST or not usage.limit or now < self.told.get(node, 0.0):
            return None
        most = MOST_GROWTH * usage.limit
        advice = prevent_oom(f"node {node}", known, usage.limit, most, end=now + HORIZON)
        if advice is not None:
            self.told[node] = now + HORIZON
        return advice
