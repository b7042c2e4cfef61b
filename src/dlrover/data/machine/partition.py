"""A partition of a stream, or an epoch of a dataset: which samples are acknowledged, leased, returned, skipped, or still to lease."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from dlrover.data.machine.spans import Ranges, Spans
from dlrover.errors import ProtocolError
from dlrover.spec.requests.shards import DataSpec


@dataclass
class Partition:
    """An epoch, or a partition of a stream. Every position is in exactly one of the sets."""

    begin: int
    #: the first position that does not (yet) exist
    end: int
    acknowledged: Ranges = field(default_factory=Ranges)
    #: leased, and not yet acknowledged
    leased: Ranges = field(default_factory=Ranges)
    #: leased and given back; leased again before anything else
    returned: Ranges = field(default_factory=Ranges)
    #: skipped, since no worker could read it
    skipped: Ranges = field(default_factory=Ranges)
    #: every lower position is in one of the sets above
    cursor: int = 0
    #: an empty range; the worker that gets its beginning gets all of it
    gap: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.cursor = self.begin

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.end - self.begin

    @property
    def left(self) -> int:
        """Upper bound of the positions left to lease; a checkpoint may contain some of them."""
        return self.returned.count + max(0, self.end - self.cursor)

    @property
    def exhausted(self) -> bool:
        """True if nothing can be leased."""
        return not self.returned and self._next()[0] >= self.end

    @property
    def complete(self) -> bool:
        """True if everything is acknowledged or skipped."""
        return self.exhausted and not self.leased

    def _next(self) -> tuple[int, int]:
        """Return the next range that was never leased, up to one that a checkpoint contains."""
        start = -1
        while start != self.cursor:
            start = self.cursor
            self.cursor = self.skipped.gap(self.acknowledged.gap(start)[0])[0]
        stops = (ranges.gap(start)[1] for ranges in (self.acknowledged, self.skipped))
        return start, min(self.end, *(self.end if stop is None else stop for stop in stops))

    def lease(self, shard: int, count: int) -> Iterator[tuple[int, int]]:
        """Lease ``count`` shards of ``shard`` positions; yield consecutive ones as one range."""
        while count > 0 and self.returned:
            start, _ = next(iter(self.returned))
            most = self.gap[1] - start if self._is_empty(start) else shard
            start, stop = self.returned.pop_first(most)
            self.leased.add(start, stop)
            count -= 1
            yield start, stop
        while count > 0:
            start, limit = self._next()
            if start >= limit:
                return
            empty = self._is_empty(start)
            stop = min(limit, self.gap[1] if empty else (start // shard + count) * shard)
            self.leased.add(start, stop)
            self.cursor = stop
            count -= 1 if empty else -(-(stop - start) // shard)
            yield start, stop

    def _is_empty(self, position: int) -> bool:
        return self.gap[0] <= position < self.gap[1]

    def leave_empty(self, start: int, stop: int) -> None:
        """Note an empty range; leases within it remain with their workers."""
        self.gap = start, stop

    def acknowledge(self, start: int, stop: int) -> None:
        """Mark leased positions as acknowledged."""
        self.leased.remove(start, stop)
        self.acknowledged.add(start, stop)

    def give_back(self, start: int, stop: int) -> None:
        """Return leased positions, so that they can be leased again."""
        self.leased.remove(start, stop)
        self.returned.add(start, stop)

    def skip(self, start: int, stop: int) -> None:
        """Skip leased positions."""
        self.leased.remove(start, stop)
        self.skipped.add(start, stop)

    def leave_out(self, start: int, stop: int) -> None:
        """Skip positions that are not acknowledged; call this before any lease."""
        self.end = max(self.end, stop)
        self.skipped.add(start, stop)
        for begin, end in self.acknowledged:
            self.skipped.remove(begin, end)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        assert self.begin <= self.cursor
        known = Ranges()
        for ranges in (self.acknowledged, self.leased, self.returned, self.skipped):
            for start, stop in ranges:
                assert self.begin <= start < stop <= self.end
                assert not known.meets(start, stop)
                known.add(start, stop)
        if self.cursor > self.begin:
            assert known.covers(self.begin, min(self.cursor, self.end))
        for start, stop in known:
            beyond = Ranges([(max(start, self.cursor), stop)])
            assert all(
                self.acknowledged.covers(a, b) or self.skipped.covers(a, b) for a, b in beyond
            )


class Totals:
    """Sums over a stream's partitions, so that a request looks at none but those that it changes."""

    def __init__(self, partitions: dict[int, Partition]) -> None:
        self._partitions = partitions
        self._known = dict.fromkeys(partitions, (0, 0, 0))
        """By partition: samples that are acknowledged, leased, and left."""
        self._changed = set(partitions)
        self.acknowledged = self.leased = self.left = 0
        self.open: list[int] = []
        """Numbers of the partitions that have something to lease, in ascending order."""

    def change(self, number: int) -> Partition:
        """Return a partition that is to be changed."""
        self._changed.add(number)
        return self._partitions[number]

    def update(self) -> Totals:
        """Take in what has changed."""
        for number in sorted(self._changed):
            partition = self._partitions[number]
            at = bisect_left(self.open, number)
            was_open = at < len(self.open) and self.open[at] == number
            if was_open == partition.exhausted:
                self.open[at : at + was_open] = [] if was_open else [number]
            before = self._known[number]
            now = partition.acknowledged.count, partition.leased.count, partition.left
            self._known[number] = now
            self.acknowledged += now[0] - before[0]
            self.leased += now[1] - before[1]
            self.left += now[2] - before[2]
        self._changed.clear()
        return self

    def open_from(self, number: int) -> Iterator[int]:
        """Yield the open partitions, beginning with a number."""
        at, count = bisect_left(self.open, number), len(self.open)
        return (self.open[(at + further) % count] for further in range(count))

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        self.update()
        of = self._partitions.values()
        assert self.acknowledged == sum(partition.acknowledged.count for partition in of)
        assert self.leased == sum(partition.leased.count for partition in of)
        assert self.left == sum(partition.left for partition in of)
        assert self.open == [n for n, p in sorted(self._partitions.items()) if not p.exhausted]


def epoch_size(spec: DataSpec) -> int:
    """Return the number of samples of an epoch that are leased."""
    return spec.size - spec.size % spec.shard if spec.drop_last else spec.size


def partitions_of(spec: DataSpec, acknowledged: Spans) -> dict[int, Partition]:
    """Return the partitions of a dataset whose acknowledged samples are ``acknowledged``.

    Raises:
        ProtocolError: ``acknowledged`` belongs to another dataset.
    """
    partitions: dict[int, Partition] = {}
    if spec.size < 0:
        partitions = {number: Partition(begin, begin) for number, begin in enumerate(spec.begins)}
    for number, ranges in acknowledged.partitions.items():
        spans = list(ranges)
        if not spans:
            continue
        known = partitions.get(number) if spec.size < 0 else Partition(0, epoch_size(spec))
        if known is None or spans[0][0] < known.begin:
            raise ProtocolError(f"The checkpoint has partition {number}, and {spec.name} has not.")
        if spec.size < 0:
            known.end = max(known.end, spans[-1][1])
        if spans[-1][1] > known.end:
            raise ProtocolError(
                f"The checkpoint contains sample {spans[-1][1] - 1} of epoch {number}; the data set "
                f"{spec.name} has {known.end} samples."
            )
        known.acknowledged = ranges
        partitions[number] = known
    return partitions
