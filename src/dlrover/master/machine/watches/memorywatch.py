"""Forecast of nodes that will soon run out of memory, from the growth of their use in the running round."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dlrover.planning.memory import MemoryAdvice, MemorySample, prevent_oom
from dlrover.spec.measurements import NodeUsage

SAMPLES = 120
"""Number of latest samples of a node that count."""
LEAST = 12
"""Minimum number of samples for a forecast, since a program fills its memory when it starts."""
MOST_GROWTH = 8
"""Maximum memory of a replacement node, as a multiple of the node's present memory."""


@dataclass
class MemoryWatch:
    """Memory use of a job's nodes in one round. Times are seconds."""

    samples: dict[int, deque[MemorySample]] = field(default_factory=dict)
    #: until when no further advice on a node is given
    quiet_until: dict[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Start over for a new round: the workers restart with empty memory."""
        self.samples.clear()

    def note(self, node: int, usage: NodeUsage, now: float) -> None:
        """Record a sample of a node whose workers train."""
        known = self.samples.setdefault(node, deque(maxlen=SAMPLES))
        known.append(MemorySample(now, usage.memory))

    def advice(self, node: int, limit: int, horizon: float, now: float) -> MemoryAdvice | None:
        """Return advice if ``limit`` bytes will not last a node ``horizon`` seconds; once per horizon."""
        known = self.samples.get(node, ())
        if len(known) < LEAST or not limit or now < self.quiet_until.get(node, 0.0):
            return None
        advice = prevent_oom(f"node {node}", known, limit, MOST_GROWTH * limit, end=now + horizon)
        if advice is not None:
            self.quiet_until[node] = now + horizon
        return advice
