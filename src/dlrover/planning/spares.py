"""How many spare nodes a job needs, by the binomial rule of ByteRobust (arXiv 2509.16293, section 6.2).

While a spare is replaced, each of the job's nodes fails with probability ``1 - exp(-rate * time)``. The
number of spares is the smallest one that is enough for the failures of that time in 99 % of all cases.
"""

from __future__ import annotations

import math

import msgspec

COVERAGE = 0.99
"""Probability with which the spares are enough until they are replaced."""
PRIOR_RATE = 2.34e-3
"""Failures per node and day before the job has measured its own: Meta's RSC-2 (arXiv 2410.21680)."""
PRIOR_SECONDS = 600.0
"""Seconds to replace a node before the job has measured them: from the order to the node's readiness."""
PRIOR_WEIGHT = 1.0
"""Failures that the prior rate counts for beside the measured ones."""
HYSTERESIS = 1.5
"""Factor on rate and time with which fewer spares must still be enough before their number falls."""
_DAY = 86400.0


class SpareFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a job has measured of its nodes."""

    failures: int = 0
    """Nodes lost."""
    node_seconds: float = 0.0
    """Seconds that nodes were watched for failures, of all nodes together."""
    replacements: tuple[float, ...] = ()
    """Seconds that the latest nodes took from their order to their readiness."""
    prior: float = PRIOR_RATE
    """Failures per node and day that were known before."""

    @property
    def rate(self) -> float:
        """Failures per node and day: the measured ones, and the prior with the weight of one failure."""
        weight = PRIOR_WEIGHT / self.prior
        return (PRIOR_WEIGHT + self.failures) / (weight + self.node_seconds / _DAY)

    @property
    def seconds(self) -> float:
        """Mean seconds to replace a node; the prior before any was measured."""
        if not self.replacements:
            return PRIOR_SECONDS
        return sum(self.replacements) / len(self.replacements)


def spares_for(nodes: int, rate: float, seconds: float) -> int:
    """Return the smallest number of spares that covers the failures of ``seconds`` with `COVERAGE`.

    Args:
        nodes: Nodes that train.
        rate: Failures per node and day.
        seconds: Time to replace a spare.
    """
    exposure = rate * seconds / _DAY
    if exposure <= 0:
        return 0
    fails, survives = math.log(-math.expm1(-exposure)), -exposure
    covered = 0.0
    for count in range(nodes + 1):
        ways = math.lgamma(nodes + 1) - math.lgamma(count + 1) - math.lgamma(nodes - count + 1)
        covered += math.exp(ways + count * fails + (nodes - count) * survives)
        if covered >= COVERAGE:
            return count
    return nodes


def next_spares(current: int, nodes: int, facts: SpareFacts) -> int:
    """Return the number of spares to have after ``current``: more at once, fewer only by a margin."""
    wanted = spares_for(nodes, facts.rate, facts.seconds)
    if wanted >= current:
        return wanted
    margin = spares_for(nodes, HYSTERESIS * facts.rate, HYSTERESIS * facts.seconds)
    return min(current, margin)
