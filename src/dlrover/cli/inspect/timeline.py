"""Each node's time by cause, moment by moment: the data for a job's page and trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dlrover.spec.outcome import CAUSES, Cause

KEPT = 4096
"""Most intervals kept per round or node. Beyond, neighbours are merged: their order is lost, no time is."""

_ORDER = (
    Cause.WAITING_FOR_RESOURCES, Cause.NODE_CHECK, Cause.RENDEZVOUS, Cause.START_UP, Cause.COMPILE,
    Cause.DATA, Cause.CHECKPOINT_BLOCK, Cause.RECOMPUTED_STEPS, Cause.PRODUCTIVE, Cause.EVAL,
    Cause.FAULT_DETECTION, Cause.DEGRADED, Cause.IDLE, Cause.SHUTDOWN, Cause.NOT_MEASURED,
)  # fmt: skip
"""Order in which the causes of one interval are drawn."""
_PLACES = [CAUSES.index(cause) for cause in _ORDER]


class CauseSpan(NamedTuple):
    """Time of one cause. Times are microseconds since the epoch."""

    since: int
    until: int
    cause: Cause


class _Interval(NamedTuple):
    since: int
    until: int
    parts: tuple[int, ...]


class Timeline:
    """Listener of a ledger. Query it after the ledger is finished."""

    def __init__(self) -> None:
        self._rounds: dict[int, list[_Interval]] = defaultdict(list)
        self._nodes: dict[int, list[_Interval]] = defaultdict(list)
        self._ran: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def node_spent(self, node: int, since: int, until: int, parts: Sequence[int]) -> None:
        """Record a node's time, by cause."""
        _append(self._nodes[node], _Interval(since, until, tuple(parts)))

    def round_spent(self, number: int, since: int, until: int, parts: Sequence[int]) -> None:
        """Record the time of each node in the world of a round."""
        _append(self._rounds[number], _Interval(since, until, tuple(parts)))

    def node_ran(self, node: int, number: int, _since: int, until: int) -> None:
        """Record that a node was in the world of a round until ``until``."""
        self._ran[node].append((number, until))

    @property
    def nodes(self) -> list[int]:
        """Ids of all nodes with recorded time, sorted."""
        return sorted(self._nodes.keys() | self._ran.keys())

    def spans(self, node: int, resolution: int = 0) -> list[CauseSpan]:
        """Return a node's time in order, without gaps except while it was away.

        Intervals shorter than ``resolution`` microseconds are merged with their neighbours.
        """
        intervals = list(self._nodes[node])
        for number, until in self._ran[node]:
            intervals += [i for i in self._rounds[number] if i.until <= until]
        intervals.sort()
        return _joined(_expanded(_merged(intervals, resolution)))


def _append(intervals: list[_Interval], interval: _Interval) -> None:
    intervals.append(interval)
    if len(intervals) > KEPT:
        whole = intervals[-1].until - intervals[0].since
        intervals[:] = _merged(intervals, 2 * whole // KEPT)


def _sum(a: _Interval, b: _Interval) -> _Interval:
    parts = tuple(x + y for x, y in zip(a.parts, b.parts, strict=True))
    return _Interval(a.since, b.until, parts)


def _merged(intervals: Iterable[_Interval], resolution: int) -> Iterator[_Interval]:
    """Yield intervals of at least ``resolution``; do not merge across a node's absence."""
    last: _Interval | None = None
    for interval in intervals:
        if last is None:
            last = interval
        elif last.until == interval.since and last.until - last.since < resolution:
            last = _sum(last, interval)
        else:
            yield last
            last = interval
    if last is not None:
        yield last


def _expanded(intervals: Iterable[_Interval]) -> Iterator[CauseSpan]:
    for interval in intervals:
        since = interval.since
        for place, cause in zip(_PLACES, _ORDER, strict=True):
            if time := interval.parts[place]:
                yield CauseSpan(since, since + time, cause)
                since += time


def _joined(spans: Iterable[CauseSpan]) -> list[CauseSpan]:
    """Return the spans, with adjacent ones of the same cause joined."""
    joined: list[CauseSpan] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last.cause is span.cause and last.until == span.since:
            joined[-1] = CauseSpan(last.since, span.until, span.cause)
        else:
            joined.append(span)
    return joined
