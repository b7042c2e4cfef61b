"""Who gets what of a cluster: the next resource goes where the average job gains most.

Each job offers sizes and what it would do with them. Of jobs that are all there and whose speed grows with the
power ``s`` of what they have, the mean completion time is least when job ``i`` of ``m``, ranked from the longest to
the shortest, counts about ``(i/m)^s`` times its speed-up (heSRPT: Berg et al., 2020): short jobs come first, but long
ones never count nothing. As nobody knows lengths well, jobs whose remaining times are within a factor of four or
so have one rank, and the root of the speed-up is taken, which divides more evenly.

Among concave values the greedy choice by marginal gain is the best one; sizes that are not on the concave
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
"""How the speed of training grows with what a job has, roughly: what ranks count."""
SPEED_POWER = 0.5
"""The power of the speed-up that counts."""
ALIKE = 4.0
"""Remaining times whose logarithms to this base round to the same number have one rank."""
STEADY = 300.0
"""Seconds that a size is expected to last: what a restart costs is spread over them."""
ROOM = 1e-9


@dataclass(frozen=True)
class Size:
    """One size that a job can have."""

    name: str
    """Tells the sizes of a job apart, such as ``8`` or ``4 workers, 2 ps``."""
    use: Mapping[str, float]
    """How much of each resource."""
    speed: float
    """Useful samples per second."""


@dataclass(frozen=True)
class Demand:
    """A job, and the sizes it can have. It may also have nothing."""

    job: str
    sizes: Sequence[Size]
    """From the smallest to the largest."""
    remaining: float
    """Useful samples until its end, as far as one knows."""
    current: str | None = None
    """The name of the size it has."""
    priority: float = 1.0
    restart: float = 30.0
    """Seconds without progress after its size was changed."""


@dataclass(frozen=True)
class Share:
    """What a job gets, and why."""

    size: Size | None
    reason: str


@dataclass(frozen=True)
class _Offer:
    size: Size
    share: float
    """The largest part of a resource of the cluster that it takes."""
    value: float


@dataclass
class _State:
    demand: Demand
    offers: list[_Offer]
    hull: list[_Offer]
    taken: int = -1
    offer: _Offer | None = None


@dataclass
class _Pool:
    capacity: Mapping[str, float]
    used: dict[str, float] = field(default_factory=dict)

    def swap(self, old: Size | None, new: Size) -> bool:
        """Take a size in place of another one, if it fits."""
        before = old.use if old is not None else {}
        change = {
            name: new.use.get(name, 0.0) - before.get(name, 0.0) for name in {*new.use, *before}
        }
        for name, more in change.items():
            if self.used.get(name, 0.0) + more > self.capacity.get(name, 0.0) + ROOM:
                return False
        for name, more in change.items():
            self.used[name] = self.used.get(name, 0.0) + more
        return True


Worth = Callable[[Demand, Size], float]
"""What a size is worth to a job; at 0 it is not offered."""


def allocate(
    demands: Sequence[Demand],
    capacity: Mapping[str, float],
    *,
    quotas: Mapping[str, float] | None = None,
    steady: float = STEADY,
    worth: Worth | None = None,
) -> dict[str, Share]:
    """Divide a cluster.

    Args:
        demands: The jobs.
        capacity: How much there is of each resource.
        quotas: More limits that sizes may use up, by names that no resource has. They bound the jobs
            that use them together; what a size costs is judged by ``capacity`` alone.
        steady: Seconds that a size is expected to last.
        worth: What the sizes are worth, for another objective than the mean completion time.

    Returns:
        A share for each job; the sum of the sizes' use never exceeds the capacity.

    Raises:
        ConfigurationError: A job has no positive number of samples left, or two jobs have one name.
    """
    if len({demand.job for demand in demands}) < len(demands):
        raise ConfigurationError("demands has two jobs of one name: each job may be there once")
    rated = worth or _completion(demands, steady)
    limits = quotas or {}
    states = [_state(demand, capacity, limits, rated) for demand in demands]
    pool = _Pool({**capacity, **limits})
    _by_marginal_gain(states, pool)
    _fill(states, pool)
    return {state.demand.job: _share(state) for state in states}


def _completion(demands: Sequence[Demand], steady: float) -> Worth:
    """Worth in mean completion time."""
    ranks = _ranks(demands)
    return lambda demand, size: ranks[demand.job] * _value(demand, size, steady)


def _ranks(demands: Sequence[Demand]) -> dict[str, float]:
    """What each job counts by its remaining time: up to 1 for the shortest, above 0 for the longest."""
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
    """How long a job still runs, in steps that are not told apart."""
    return round((math.log(demand.remaining) - math.log(_reference(demand))) / math.log(ALIKE))


def _reference(demand: Demand) -> float:
    """The speed that a job's others are compared with: that of its first size."""
    return next((size.speed for size in demand.sizes if size.speed > 0), 1.0)


def _state(
    demand: Demand, capacity: Mapping[str, float], quotas: Mapping[str, float], worth: Worth
) -> _State:
    offers = [
        _Offer(size, _dominant(size, capacity, quotas), worth(demand, size))
        for size in demand.sizes
        if all(size.use.get(name, 0.0) <= limit + ROOM for name, limit in quotas.items())
    ]
    possible = [offer for offer in offers if offer.value > 0 and offer.share <= 1 + ROOM]
    possible.sort(key=lambda offer: (offer.share, -offer.value))
    return _State(demand, possible, _hull(possible))


def _dominant(size: Size, capacity: Mapping[str, float], quotas: Mapping[str, float]) -> float:
    return max(
        (
            amount / capacity[name] if capacity.get(name, 0.0) > 0 else float("inf")
            for name, amount in size.use.items()
            if amount > 0 and name not in quotas
        ),
        default=0.0,
    )


def _value(demand: Demand, size: Size, steady: float) -> float:
    """The root of the speed-up, less what a restart takes of it, times the priority."""
    if size.speed <= 0:
        return 0.0
    lasts = min(demand.remaining / size.speed, steady)
    changed = demand.current is not None and size.name != demand.current
    kept = lasts / (lasts + demand.restart) if changed else 1.0
    return demand.priority * math.pow(kept * size.speed / _reference(demand), SPEED_POWER)


def _hull(offers: Sequence[_Offer]) -> list[_Offer]:
    """The offers on the upper concave hull over (share, value), from nothing on, by share."""
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
    return (after.value - value) / max(after.share - share, ROOM)


def _by_marginal_gain(states: Sequence[_State], pool: _Pool) -> None:
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


def _fill(states: Sequence[_State], pool: _Pool) -> None:
    """Give what is left over, where it is worth most."""
    for state in sorted(states, key=lambda state: -max((o.value for o in state.offers), default=0)):
        for offer in sorted(state.offers, key=lambda offer: -offer.value):
            if state.offer is not None and offer.value <= state.offer.value:
                break
            if pool.swap(state.offer.size if state.offer else None, offer.size):
                state.offer = offer
                break


def _share(state: _State) -> Share:
    demand, offer = state.demand, state.offer
    if offer is None:
        if not state.offers:
            return Share(
                None, "waits: no size of the job both fits into the cluster and makes progress"
            )
        return Share(None, "waits: what it would need brings more in other jobs")
    left = demand.remaining / offer.size.speed
    if demand.current == offer.size.name:
        return Share(offer.size, f"keeps {offer.size.name}: no other size is worth a restart")
    return Share(
        offer.size,
        f"gets {offer.size.name}: {offer.size.speed:.4g} useful samples/s, about {left:.0f} s to go",
    )
