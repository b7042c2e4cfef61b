"""Which sizes beside the best measured one may still be better, whatever the model says.

A model of smooth times says nothing of a cliff, a slow switch or an uneven division. Three facts hold without one:
speed grows at most in proportion to the nodes, no size is faster than its computation alone, and one node
exchanges nothing with others. What they leave open is measured once: the middle of the gap on each side of the best
size, until both gaps are closed, and one size far away on each side, where the law may have turned. With servers that
is done for workers alone, for servers alone, and for both in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from dlrover.spec.roles import Size

ERROR = 0.05
"""Share by which a measured speed may be too low."""
FAR, FARTHEST = 1.5, 4.0
"""A size between these multiples of the best one, or of its inverse, tells whether the law turns far away."""

Worth = Callable[[float, Size], float]
"""What a throughput on a size is worth."""


def possible(
    sizes: Iterable[Size],
    known: Mapping[Size, float],
    worth: Worth,
    least: float,
    alone: float | None = None,
) -> list[Size]:
    """Those of the sizes that no measurement keeps from being worth more than ``least``.

    Args:
        sizes: Sizes that were not measured.
        known: Measured throughput by size.
        worth: What throughputs are worth.
        least: What a size must be worth.
        alone: Throughput of a worker that waits for no other, if it was measured.
    """
    return [size for size in sizes if worth(_ceiling(size, known, alone), size) > least]


def _ceiling(size: Size, known: Mapping[Size, float], alone: float | None) -> float:
    """The throughput that a size cannot exceed; infinite where nothing bounds it."""
    bounds = [
        _factor(size, other) * speed
        for other, speed in known.items()
        if other != size and other.workers <= size.workers and other.servers <= size.servers
    ]
    if alone is not None:
        bounds.append(size.workers * alone)
    return (1 + ERROR) * min(bounds, default=math.inf)


def _factor(size: Size, other: Size) -> float:
    """How many times the nodes of another size one has, of the role with the most."""
    return max(many / few for many, few in zip(size, other, strict=True) if few)


def within_reach(measured: Collection[Size], sizes: Iterable[Size]) -> list[Size]:
    """Those of the sizes that are not less than half of the smallest measured one: fewer may not have the memory."""
    workers, servers = min(s.workers for s in measured), min(s.servers for s in measured)
    return [s for s in sizes if 2 * s.workers >= workers and 2 * s.servers >= servers]


def neighbours(here: Size, measured: Collection[Size], sizes: Collection[Size]) -> list[Size]:
    """The sizes to measure next to the best one: two at most to each side, for each role and for both.

    Args:
        here: The best measured size.
        measured: Sizes that were measured, this one included.
        sizes: Those that were not, and that may be better.
    """
    found: list[Size] = []
    for along, place in _lines(here):
        line = {along(size): size for size in sizes if size == place(along(size))}
        known = [along(size) for size in measured if size == place(along(size))]
        found += [line[n] for n in _on_a_line(along(here), known, line)]
    return list(dict.fromkeys(found))


def beside(here: Size, workers: Iterable[int], servers: Iterable[int]) -> list[Size]:
    """The sizes among which `neighbours` looks, of all that a job may have."""
    workers, servers = list(workers), set(servers)
    sizes = [Size(n, here.servers) for n in workers] + [Size(here.workers, n) for n in servers]
    if here.servers:
        in_proportion = [_in_proportion(here, n) for n in workers]
        sizes += [size for size in in_proportion if size.servers in servers]
    return [size for size in dict.fromkeys(sizes) if size != here]


def _lines(here: Size) -> list[tuple[Callable[[Size], int], Callable[[int], Size]]]:
    """Lines through a size: the number that tells its sizes apart, and the size by this number."""
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
    """The numbers to measure next to the best one: two to each side at most."""
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
    """The number whose ratio to another one is nearest to 1."""
    return min(among, key=lambda n: abs(math.log(n / target)))
