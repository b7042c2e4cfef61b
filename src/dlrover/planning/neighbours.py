"""Sizes next to the best measured one that may still be better, whatever the model says.

A model of smooth times cannot predict a cliff, a slow switch or an uneven division. Three facts hold without
it: speed grows at most in proportion to the nodes, no size is faster than its computation alone, and one node
exchanges nothing with others. The sizes that they leave open are measured once: the middle of the gap on each
side of the best size, until both gaps are closed, and one size far away on each side, where the trend may
have turned. With servers, this is done for workers alone, for servers alone, and for both in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from dlrover.spec.roles import Size

ERROR = 0.05
"""Maximum relative error by which a measured speed may be too low."""
FAR, FARTHEST = 1.5, 4.0
"""Range of multiples of the best size (or inverse) in which one size shows if the trend turns far away."""

Worth = Callable[[float, Size], float]
"""Function that rates a throughput on a size."""


def possible(
    sizes: Iterable[Size],
    known: Mapping[Size, float],
    worth: Worth,
    least: float,
    alone: float | None = None,
) -> list[Size]:
    """Return the sizes that no measurement keeps from being worth more than ``least``.

    Args:
        sizes: Sizes that were not measured.
        known: Measured throughput by size.
        worth: Rates a throughput on a size.
        least: Value that a size must exceed.
        alone: Throughput of a worker that waits for no other, if it was measured.
    """
    return [size for size in sizes if worth(_ceiling(size, known, alone), size) > least]


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


def within_reach(measured: Collection[Size], sizes: Iterable[Size]) -> list[Size]:
    """Return the sizes of at least half the smallest measured one: fewer nodes may lack the memory."""
    workers, servers = min(s.workers for s in measured), min(s.servers for s in measured)
    return [s for s in sizes if 2 * s.workers >= workers and 2 * s.servers >= servers]


def neighbours(here: Size, measured: Collection[Size], sizes: Collection[Size]) -> list[Size]:
    """Return the sizes to measure next to the best one: at most two on each side, for each role and for both.

    Args:
        here: The best measured size.
        measured: Sizes that were measured, including this one.
        sizes: Sizes that were not measured and may be better.
    """
    found: list[Size] = []
    for along, place in _lines(here):
        line = {along(size): size for size in sizes if size == place(along(size))}
        known = [along(size) for size in measured if size == place(along(size))]
        found += [line[n] for n in _on_a_line(along(here), known, line)]
    return list(dict.fromkeys(found))


def beside(here: Size, workers: Iterable[int], servers: Iterable[int]) -> list[Size]:
    """Return the sizes among which `neighbours` looks, from all that a job may have."""
    workers, servers = list(workers), set(servers)
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
