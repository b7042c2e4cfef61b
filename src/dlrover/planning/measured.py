"""Measured sizes of a job, which take precedence over what a model predicts.

A better measured size is taken, a worse one is not tried again. A model of smooth times cannot predict a cliff, a
slow switch or an uneven division. Three facts hold without it: speed grows at most in proportion to the nodes, no
size is faster than its computation alone, and one node exchanges nothing with others. The sizes that they leave
open are measured once: the middle of the gap on each side of the best size, until both gaps are closed, and one
size far away on each side, where the trend may have turned. With servers, this is done for workers alone, for
servers alone, and for both in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from dlrover.planning.search import Preferences, worth
from dlrover.planning.throughput import SpeedPrediction
from dlrover.spec.node import Size
from dlrover.spec.plan import Effect

ERROR = 0.05
"""Maximum relative error by which a measured speed may be too low."""
FAR, FARTHEST = 1.5, 4.0
"""Range of multiples of the best size (or inverse) in which one size shows if the trend turns far away."""
SPREAD = 0.2
"""Relative deviation within which a measured speed is expected to recur."""


class Proposal(NamedTuple):
    """A size that a job should have next."""

    size: Size
    reason: str
    effect: Effect


@dataclass(frozen=True)
class Measured:
    """Measured sizes of a job."""

    here: Size
    """Present size."""
    known: Mapping[Size, float]
    """Mean throughput by size, the present one included."""
    cost: Callable[[Size], float]
    choice: Preferences

    def worth(self, throughput: float, size: Size) -> float:
        """Return the figure that the search maximizes."""
        return float(worth(throughput, self.cost(size), self.choice))

    @property
    def least(self) -> float:
        """The worth that a size must exceed to justify a change."""
        return (1 + self.choice.gain) * self.worth(self.known[self.here], self.here)

    def better(self, allowed: Callable[[Size], bool]) -> Proposal | None:
        """Return the best measured size that is allowed; None if it does not justify a change."""
        sizes = [size for size in self.known if allowed(size)]
        best = max(sizes, key=lambda size: self.worth(self.known[size], size), default=self.here)
        speed, before = self.known[best], self.known[self.here]
        if self.worth(speed, best) <= self.least:
            return None
        faster, dearer = speed / before - 1, self.cost(best) / self.cost(self.here) - 1
        reason = (
            f"{self.here.change_to(best)}: {faster:+.0%} throughput for {dearer:+.0%} cost, "
            "as it was measured before"
        )
        low, high = speed * (1 - SPREAD), speed * (1 + SPREAD)
        effect = Effect(throughput=speed, low=low, high=high, before=before, cost=self.cost(best))
        return Proposal(best, reason, effect)

    def neighbour(
        self,
        workers: Collection[int],
        servers: Collection[int],
        predict: Callable[[Size], SpeedPrediction],
        *,
        alone: float | None = None,
        fits: Callable[[Size], bool] = lambda _: True,
    ) -> Proposal | None:
        """Return a size to measure next to the present, best one, which no measurement rules out.

        Args:
            workers: Numbers of workers that the job may have.
            servers: Numbers of servers that it may have.
            predict: The model.
            alone: Throughput of a worker that waits for no other, if it was measured.
            fits: Returns whether the resources for a size are free.
        """
        open_ = [
            size
            for size in _beside(self.here, workers, servers)
            if size not in self.known
            and self.worth(_ceiling(size, self.known, alone), size) > self.least
        ]
        near = _within_reach(self.known, open_)
        found = _neighbours(self.here, self.known, near)
        one = Size(1)
        if near and one in open_ and self.worth(predict(one).high, one) > self.least:
            found.append(min(near))
        found = [size for size in found if fits(size)]
        if not found:
            return None
        predicted = {size: predict(size) for size in found}
        target = max(found, key=lambda size: self.worth(predicted[size].high, size))
        reason = (
            f"{self.here.change_to(target)}: to be measured, "
            "because no measurement rules out that it is the best size"
        )
        before, cost = self.known[self.here], self.cost(target)
        return Proposal(target, reason, predicted[target].effect(before=before, cost=cost))


def means(samples: Iterable[tuple[Size, float]]) -> dict[Size, float]:
    """Return the mean throughput by size."""
    found: dict[Size, list[float]] = {}
    for size, throughput in samples:
        found.setdefault(size, []).append(throughput)
    return {size: mean(values) for size, values in found.items()}


def _ceiling(size: Size, known: Mapping[Size, float], alone: float | None) -> float:
    """Return the throughput that a size cannot exceed; infinite if nothing bounds it."""
    bounds = [
        _factor(size, other) * speed
        for other, speed in known.items()
        if other != size and other.workers <= size.workers and other.servers <= size.servers
    ]
    if alone is not None:
        bounds.append(size.workers * alone)
    return (1 + ERROR) * min(bounds, default=math.inf)


def _factor(size: Size, other: Size) -> float:
    """Return the ratio of a size's nodes to another size's, for the role with the largest ratio."""
    return max(many / few for many, few in zip(size, other, strict=True) if few)


def _within_reach(measured: Collection[Size], sizes: Iterable[Size]) -> list[Size]:
    """Return the sizes of at least half the smallest measured one: fewer nodes may lack the memory."""
    workers, servers = min(s.workers for s in measured), min(s.servers for s in measured)
    return [s for s in sizes if 2 * s.workers >= workers and 2 * s.servers >= servers]


def _neighbours(here: Size, measured: Collection[Size], sizes: Collection[Size]) -> list[Size]:
    """Return at most two of the open sizes on each side of the best one, for each role and for both."""
    found: list[Size] = []
    for along, place in _lines(here):
        line = {along(size): size for size in sizes if size == place(along(size))}
        known = [along(size) for size in measured if size == place(along(size))]
        found += [line[n] for n in _on_a_line(along(here), known, line)]
    return list(dict.fromkeys(found))


def _beside(here: Size, workers: Collection[int], servers: Collection[int]) -> list[Size]:
    """Return the sizes of a job that lie on a line with the present one."""
    sizes = [Size(n, here.servers) for n in workers] + [Size(here.workers, n) for n in servers]
    if here.servers:
        in_proportion = [_in_proportion(here, n) for n in workers]
        sizes += [size for size in in_proportion if size.servers in servers]
    return [size for size in dict.fromkeys(sizes) if size != here]


def _lines(here: Size) -> list[tuple[Callable[[Size], int], Callable[[int], Size]]]:
    """Return lines through a size: the coordinate of a size on the line, and the size at a coordinate."""
    lines: list[tuple[Callable[[Size], int], Callable[[int], Size]]] = [
        (lambda size: size.workers, lambda n: Size(n, here.servers))
    ]
    if here.servers:
        lines.append((lambda size: size.servers, lambda n: Size(here.workers, n)))
        lines.append((lambda size: size.workers, lambda n: _in_proportion(here, n)))
    return lines


def _in_proportion(here: Size, workers: int) -> Size:
    return Size(workers, max(1, round(here.servers * workers / here.workers)))


def _on_a_line(here: int, measured: Collection[int], open_: Collection[int]) -> list[int]:
    """Return the numbers to measure next to the best one: at most two on each side."""
    lower = max((n for n in measured if n < here), default=here / 4)
    upper = min((n for n in measured if n > here), default=here * 4)
    below, above = [n for n in open_ if n < here], [n for n in open_ if n > here]
    wanted = [
        (math.sqrt(here * lower), [n for n in below if n > lower]),
        (math.sqrt(here * upper), [n for n in above if n < upper]),
    ]
    if not any(here / FARTHEST <= n <= here / FAR for n in measured):
        wanted.append((here / 2, [n for n in below if n <= here / FAR]))
    if not any(here * FAR <= n <= here * FARTHEST for n in measured):
        wanted.append((here * 2, [n for n in above if n >= here * FAR]))
    return [nearest(target, among) for target, among in wanted if among]


def nearest(target: float, among: Iterable[int]) -> int:
    """Return the number whose ratio to ``target`` is nearest to 1."""
    return min(among, key=lambda n: abs(math.log(n / target)))
