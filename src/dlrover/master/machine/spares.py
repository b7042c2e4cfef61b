"""Spares: warm nodes without ranks. Each takes the place of a lost node at once.

A spare that the platform launched has a wanted rank of its own (`dlrover.spec.node.FIRST_SPARE`), and its offer
is kept here, apart from those of the rounds: no world counts on it. When a node of the world is lost, the spare
gets the lost node's wanted rank and joins the round with the offer that it made before, and another spare is
launched. Where nodes come by themselves, those that find a full world are spares: their offers stay with the
rounds.

How many a job needs follows from the binomial rule of ByteRobust (arXiv 2509.16293, section 6.2): while a spare is
replaced, each of the job's nodes fails with probability ``1 - exp(-rate * time)``. The number of spares is the smallest
one that is enough for the failures of that time in 99 % of all cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlrover.spec.events import SparesDecided
from dlrover.spec.job import JobSpec
from dlrover.spec.world import Offer

if TYPE_CHECKING:
    from dlrover.master.machine.state import Node

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
REPLACEMENTS = 16
"""Number of the latest nodes whose time from order to readiness counts."""
REVIEW = 3600.0
"""Seconds between two reviews of an automatic number: without failures, the rate falls with time."""
_DAY = 86400.0


@dataclass
class Spares:
    """The spares of one job. Change it only through its methods."""

    job: JobSpec
    #: offer of each ready spare that the platform launched
    offers: dict[int, Offer] = field(default_factory=dict)
    #: nodes that came by themselves and wait because the world is full
    standing: set[int] = field(default_factory=set)
    #: when each node that has not connected yet was ordered
    ordered: dict[int, float] = field(default_factory=dict)
    #: seconds from order to readiness of the latest nodes
    replacements: list[float] = field(default_factory=list)
    #: nodes lost so far
    failures: int = 0
    #: seconds that nodes were in the world, of all nodes together, until ``counted_at``
    node_seconds: float = 0.0
    counted_at: float = 0.0
    #: when spares that could not be started are tried again
    retry_at: float | None = None
    #: when an automatic number is reviewed without another reason
    review_at: float | None = None

    # ---- queries

    @property
    def rate(self) -> float:
        """Failures per node and day: the measured ones, and the prior with the weight of one failure."""
        weight = PRIOR_WEIGHT / PRIOR_RATE
        return (PRIOR_WEIGHT + self.failures) / (weight + self.node_seconds / _DAY)

    @property
    def seconds(self) -> float:
        """Mean seconds to replace a node; the prior before any was measured."""
        if not self.replacements:
            return PRIOR_SECONDS
        return sum(self.replacements) / len(self.replacements)

    def of(self, node_id: int) -> bool:
        """Return whether a node is a spare that can take another one's place now."""
        return node_id in self.offers or node_id in self.standing

    def best(
        self,
        nodes: Mapping[int, Node],
        lost: Node,
        passed: AbstractSet[int],
        avoid: AbstractSet[str],
    ) -> Node | None:
        """Return the spare to take a lost node's place: one that passed its check, else the oldest.

        It must have at least the cores and the memory that the lost node's successor would get, and run on none
        of the hosts in ``avoid``.
        """
        fit = [
            nodes[i]
            for i in self.offers
            if nodes[i].cpu_factor >= lost.cpu_factor
            and nodes[i].memory_factor >= lost.memory_factor
            and nodes[i].hostname not in avoid
        ]
        return min(fit, key=lambda node: (node.id not in passed, node.id), default=None)

    def deadline(self) -> float | None:
        """Return when something is due without another input."""
        return min((at for at in (self.retry_at, self.review_at) if at is not None), default=None)

    # ---- changes

    def stand_by(self, node_id: int, offer: Offer) -> bool:
        """Keep the offer of a spare that the platform launched; return whether it is its first."""
        new = node_id not in self.offers
        self.offers[node_id] = offer
        return new

    def take(self, node_id: int) -> Offer:
        """Return the offer of a spare that is none any more."""
        return self.offers.pop(node_id)

    def drop(self, node_id: int) -> None:
        """Forget a node that is gone or has lost its connection."""
        self.offers.pop(node_id, None)
        self.standing.discard(node_id)

    def count(self, members: int, now: float) -> None:
        """Count the time of a world with that many nodes since the last call."""
        if self.counted_at:
            self.node_seconds += members * max(0.0, now - self.counted_at)
        self.counted_at = now

    def arrived(self, node_id: int, now: float) -> None:
        """Measure how long an ordered node took to come."""
        at = self.ordered.pop(node_id, None)
        if at is not None:
            self.replacements = [*self.replacements, now - at][-REPLACEMENTS:]

    def decide(self, current: int, nodes: int, now: float) -> SparesDecided | None:
        """Choose the number of spares for a world of ``nodes``; None if it stays as it is."""
        if not self.job.auto_spares:
            return None
        self.review_at = now + REVIEW
        number = next_spares(current, nodes, self.rate, self.seconds)
        if number == current:
            return None
        return SparesDecided(current, number, nodes, self.rate, self.seconds)

    def validate(self, nodes: Mapping[int, Node]) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        assert not self.offers.keys() & self.standing, "a spare was launched and came by itself"
        for node_id in (*self.offers, *self.standing):
            assert nodes[node_id].connected, "a spare without a connection"
        assert len(self.replacements) <= REPLACEMENTS
        assert self.node_seconds >= 0


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


def next_spares(current: int, nodes: int, rate: float, seconds: float) -> int:
    """Return the number of spares to have after ``current``: more at once, fewer only by a margin."""
    wanted = spares_for(nodes, rate, seconds)
    if wanted >= current:
        return wanted
    margin = spares_for(nodes, HYSTERESIS * rate, HYSTERESIS * seconds)
    return min(current, margin)
