"""Which nodes will run out of memory soon, by how their use has grown in the running round."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dlrover.planning.memory import MemoryAdvice, MemorySample, prevent_oom
from dlrover.spec.usage import NodeUsage

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

    def note(self, node: int, usage: NodeUsage, now: float) -> None:
        """Take in a look at a node whose workers train."""
        known = self.samples.setdefault(node, deque(maxlen=SAMPLES))
        known.append(MemorySample(now, usage.memory))

    def advice(self, node: int, limit: int, horizon: float, now: float) -> MemoryAdvice | None:
        """What a node needs whose ``limit`` of memory will not last for ``horizon`` seconds; told once in that time."""
        known = self.samples.get(node, ())
        if len(known) < LEAST or not limit or now < self.told.get(node, 0.0):
            return None
        advice = prevent_oom(f"node {node}", known, limit, MOST_GROWTH * limit, end=now + horizon)
        if advice is not None:
            self.told[node] = now + horizon
        return advice
