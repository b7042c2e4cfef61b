"""Who gets what of a cluster: the next resource goes where it ends jobs soonest.

Each job offers sizes and what it would do with them. A size is worth the rate at which it brings the job
to its end: its priority divided by the time that remains. Among concave values the greedy choice by
marginal gain is the best one; sizes that are not on the concave hull of a job are left to the last pass,
which fills what is left over.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrover.errors import ConfigurationError

STEADY = 900.0
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


def allocate(
    demands: Sequence[Demand], capacity: Mapping[str, float], *, steady: float = STEADY
) -> dict[str, Share]:
    """Divide a cluster.

    Args:
        demands: The jobs.
        capacity: How much there is of each resource.
        steady: Seconds that a size is expected to last.

    Returns:
        A share for each job; the sum of the sizes' use never exceeds the capacity.

    Raises:
        ConfigurationError: A job has no positive number of samples left, or two jobs have one name.
    """
    if len({demand.job for demand in demands}) < len(demands):
        raise ConfigurationError("demands has two jobs of one name: each job may be there once")
    states = [_state(demand, capacity, steady) for demand in demands]
    pool = _Pool(capacity)
    _by_marginal_gain(states, pool)
    _fill(states, pool)
    return {state.demand.job: _share(state) for state in states}


def _state(demand: Demand, capacity: Mapping[str, float], steady: float) -> _State:
    if not demand.remaining > 0:
        raise ConfigurationError(
            f"remaining of job {demand.job!r} is {demand.remaining}: it must be above 0"
        )
    offers = [
        _Offer(size, _dominant(size, capacity), _value(demand, size, steady))
        for size in demand.sizes
    ]
    possible = [offer for offer in offers if offer.value > 0 and offer.share <= 1 + ROOM]
    possible.sort(key=lambda offer: (offer.share, -offer.value))
    return _State(demand, possible, _hull(possible))


def _dominant(size: Size, capacity: Mapping[str, float]) -> float:
    return max(
        (
            amount / capacity[name] if capacity.get(name, 0.0) > 0 else float("inf")
            for name, amount in size.use.items()
            if amount > 0
        ),
        default=0.0,
    )


def _value(demand: Demand, size: Size, steady: float) -> float:
    """Ends per second: priority over the time until the end, less what a restart takes of it."""
    if size.speed <= 0:
        return 0.0
    left = demand.remaining / size.speed
    lasts = min(left, steady)
    changed = demand.current is not None and size.name != demand.current
    kept = lasts / (lasts + demand.restart) if changed else 1.0
    return demand.priority * kept / left


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
        return Share(None, "waits: other jobs end sooner with what it would need")
    left = demand.remaining / offer.size.speed
    if demand.current == offer.size.name:
        return Share(offer.size, f"keeps {offer.size.name}: a change would not pay for the restart")
    return Share(
        offer.size,
        f"gets {offer.size.name}: {offer.size.speed:.4g} useful samples/s, about {left:.0f} s to go",
    )
