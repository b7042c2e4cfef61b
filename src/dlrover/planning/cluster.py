"""Division of a cluster: the next resource goes to the job that gains most, for the mean completion time.

Each job offers sizes and its speed on them. Assume that all jobs are present and that their speed grows with
the power ``s`` of their resources. Then the mean completion time is least if job ``i`` of ``m``, ranked from
the longest to the shortest, counts about ``(i/m)^s`` times its speed-up (heSRPT: Berg et al., 2020): short jobs
come first, but long ones always count something. Lengths are not known well, so jobs whose remaining times are
within a factor of about four share a rank. The root of the speed-up is taken, which divides more evenly.

Among concave values the greedy choice by marginal gain is the best one. Sizes that are not on the concave
hull of a job are left to the last pass, which fills what is left over.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dlrover.errors import ConfigurationError

RANK_POWER = 0.8
"""Rough exponent of training speed over resources, used for ranks."""
SPEED_POWER = 0.5
"""Exponent of the speed-up in a size's value."""
ALIKE = 4.0
"""Base of logarithms: remaining times whose logarithms round to the same number share a rank."""
STEADY = 300.0
"""Seconds that a size is expected to last; the cost of a restart is spread over them."""
SLACK = 1e-9


@dataclass(frozen=True)
class Option:
    """One size that a job can have."""

    name: str
    """Distinguishes the sizes of a job, such as ``8`` or ``4 workers, 2 ps``."""
    use: Mapping[str, float]
    """Amount of each resource."""
    speed: float
    """Useful samples per second."""


@dataclass(frozen=True)
class Demand:
    """A job and the sizes it can have. It may also get nothing."""

    job: str
    sizes: Sequence[Option]
    """From the smallest to the largest."""
    remaining: float
    """Estimated useful samples until the job's end."""
    current: str | None = None
    """Name of its present size; None if it has none."""
    priority: float = 1.0
    restart: float = 30.0
    """Seconds without progress after a change of its size."""


@dataclass(frozen=True)
class Share:
    """A job's share of the cluster, with the reason."""

    size: Option | None
    reason: str


@dataclass(frozen=True)
class _Offer:
    size: Option
    share: float
    """Largest share of any resource of the cluster that the size takes."""
    value: float


@dataclass
class _JobState:
    demand: Demand
    offers: list[_Offer]
    hull: list[_Offer]
    taken: int = -1
    offer: _Offer | None = None


@dataclass
class _Pool:
    capacity: Mapping[str, float]
    used: dict[str, float] = field(default_factory=dict)

    def swap(self, old: Option | None, new: Option) -> bool:
        """Replace a size by another one if that fits; return whether it does."""
        before = old.use if old is not None else {}
        change = {
            name: new.use.get(name, 0.0) - before.get(name, 0.0) for name in {*new.use, *before}
        }
        for name, more in change.items():
            if self.used.get(name, 0.0) + more > self.capacity.get(name, 0.0) + SLACK:
                return False
        for name, more in change.items():
            self.used[name] = self.used.get(name, 0.0) + more
        return True


Worth = Callable[[Demand, Option], float]
"""Function that rates a size for a job; a size worth 0 is not offered."""


def allocate(
    demands: Sequence[Demand],
    capacity: Mapping[str, float],
    *,
    quotas: Mapping[str, float] | None = None,
    worth: Worth | None = None,
) -> dict[str, Share]:
    """Divide a cluster.

    Args:
        demands: The jobs.
        capacity: Total amount of each resource.
        quotas: Further limits on the use of sizes, under names that no resource has. They bound the jobs
            that use them together; a size's cost depends on ``capacity`` alone.
        worth: Rates the sizes, for an objective other than the mean completion time.

    Returns:
        A share for each job; the sum of the sizes' use never exceeds the capacity.

    Raises:
        ConfigurationError: A job has no positive number of samples left, or two jobs have one name.
    """
    if len({demand.job for demand in demands}) < len(demands):
        raise ConfigurationError("demands has two jobs of one name: each job may be there once")
    rated = worth or _completion(demands)
    limits = quotas or {}
    states = [_state(demand, capacity, limits, rated) for demand in demands]
    pool = _Pool({**capacity, **limits})
    _by_marginal_gain(states, pool)
    _fill(states, pool)
    return {state.demand.job: _share(state) for state in states}


def _completion(demands: Sequence[Demand]) -> Worth:
    """Return the rating of sizes by mean completion time."""
    ranks = _ranks(demands)
    return lambda demand, size: ranks[demand.job] * _value(demand, size)


def _ranks(demands: Sequence[Demand]) -> dict[str, float]:
    """Return each job's weight by its remaining time: up to 1 for the shortest, above 0 for the longest."""
    for demand in demands:
        if not (demand.remaining > 0 and math.isfinite(demand.remaining)):
            raise ConfigurationError(
                f"remaining of job {demand.job!r} is {demand.remaining}: it must be a positive number"
            )
    lengths = [_length(demand) for demand in demands]
    ordered, count = sorted(lengths), len(demands)
    ranks = {}
    for demand, length in zip(demands, lengths, strict=True):
        shorter = bisect_left(ordered, length)
        longer = count - bisect_right(ordered, length)
        middle = longer + (count - shorter - longer + 1) / 2
        ranks[demand.job] = (middle / count) ** RANK_POWER
    return ranks


def _length(demand: Demand) -> int:
    """Return the class of a job's remaining time on its first size; classes differ by the factor `ALIKE`."""
    return round((math.log(demand.remaining) - math.log(_reference(demand))) / math.log(ALIKE))


def _reference(demand: Demand) -> float:
    """Return the speed that a job's other speeds are compared with: that of its first size."""
    return next((size.speed for size in demand.sizes if size.speed > 0), 1.0)


def _state(
    demand: Demand, capacity: Mapping[str, float], quotas: Mapping[str, float], worth: Worth
) -> _JobState:
    offers = [
        _Offer(size, _dominant(size, capacity, quotas), worth(demand, size))
        for size in demand.sizes
        if all(size.use.get(name, 0.0) <= limit + SLACK for name, limit in quotas.items())
    ]
    possible = [offer for offer in offers if offer.value > 0 and offer.share <= 1 + SLACK]
    possible.sort(key=lambda offer: (offer.share, -offer.value))
    return _JobState(demand, possible, _hull(possible))


def _dominant(size: Option, capacity: Mapping[str, float], quotas: Mapping[str, float]) -> float:
    return max(
        (
            amount / capacity[name] if capacity.get(name, 0.0) > 0 else float("inf")
            for name, amount in size.use.items()
            if amount > 0 and name not in quotas
        ),
        default=0.0,
    )


def _value(demand: Demand, size: Option) -> float:
    """Return the root of the speed-up after the cost of a restart, times the priority."""
    if size.speed <= 0:
        return 0.0
    lasts = min(demand.remaining / size.speed, STEADY)
    changed = demand.current is not None and size.name != demand.current
    kept = lasts / (lasts + demand.restart) if changed else 1.0
    return demand.priority * math.pow(kept * size.speed / _reference(demand), SPEED_POWER)


def _hull(offers: Sequence[_Offer]) -> list[_Offer]:
    """Return the offers on the upper concave hull over (share, value), starting from nothing, by share."""
    hull: list[_Offer] = []
    for offer in offers:
        if hull and offer.value <= hull[-1].value:
            continue
        while hull and _slope(hull[-2] if len(hull) > 1 else None, hull[-1]) <= _slope(
            hull[-1], offer
        ):
            hull.pop()
        hull.append(offer)
    return hull


def _slope(before: _Offer | None, after: _Offer) -> float:
    share, value = (before.share, before.value) if before is not None else (0.0, 0.0)
    return (after.value - value) / max(after.share - share, SLACK)


def _by_marginal_gain(states: Sequence[_JobState], pool: _Pool) -> None:
    queue = [
        (-_slope(None, state.hull[0]), number) for number, state in enumerate(states) if state.hull
    ]
    heapq.heapify(queue)
    while queue:
        _, number = heapq.heappop(queue)
        state = states[number]
        offer = state.hull[state.taken + 1]
        if not pool.swap(state.offer.size if state.offer else None, offer.size):
            continue  # the job keeps what it has; a smaller one may still fit
        state.taken, state.offer = state.taken + 1, offer
        if state.taken + 1 < len(state.hull):
            heapq.heappush(queue, (-_slope(offer, state.hull[state.taken + 1]), number))


def _fill(states: Sequence[_JobState], pool: _Pool) -> None:
    """Give what is left over to where it is worth most."""
    for state in sorted(states, key=lambda state: -max((o.value for o in state.offers), default=0)):
        for offer in sorted(state.offers, key=lambda offer: -offer.value):
            if state.offer is not None and offer.value <= state.offer.value:
                break
            if pool.swap(state.offer.size if state.offer else None, offer.size):
                state.offer = offer
                break


def _share(state: _JobState) -> Share:
    demand, offer = state.demand, state.offer
    if offer is None:
        if not state.offers:
            return Share(
                None, "waits: no size of the job both fits into the cluster and makes progress"
            )
        return Share(None, "waits: the resources that it needs bring more in other jobs")
    left = demand.remaining / offer.size.speed
    if demand.current == offer.size.name:
        return Share(offer.size, f"keeps {offer.size.name}: no other size is worth a restart")
    return Share(
        offer.size,
        f"gets {offer.size.name}: {offer.size.speed:.4g} useful samples/s, about {left:.0f} s to go",
    )
