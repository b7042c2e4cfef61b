"""Sets of positions, stored as spans that do not touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from dlrover._util import decoding
from dlrover.errors import ProtocolError
from dlrover.spec.requests.shards import Span

MAX_UNPACKED = 10_000_000
"""Maximum numbers in a packed set, those of consecutive partitions with the same samples counted for each."""


class Ranges:
    """A set of integers. Adding next to the last addition takes constant time, and so does their number."""

    __slots__ = ("_starts", "_stops", "count")

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.count = 0
        """Number of integers; only the methods change it."""
        for start, stop in pairs:
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def __len__(self) -> int:
        """Number of ranges."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def add(self, start: int, stop: int) -> None:
        """Add ``start`` up to ``stop``; some of them may already be in the set."""
        if start >= stop:
            return
        starts, stops = self._starts, self._stops
        if stops and stops[-1] == start:
            stops[-1] = stop
            self.count += stop - start
            return
        first, last = bisect_left(stops, start), bisect_right(starts, stop)
        self.count -= sum(stops[first:last]) - sum(starts[first:last])
        if first < last:
            start, stop = min(start, starts[first]), max(stop, stops[last - 1])
        starts[first:last], stops[first:last] = [start], [stop]
        self.count += stop - start

    def remove(self, start: int, stop: int) -> None:
        """Remove ``start`` up to ``stop``; some of them may not be in the set."""
        if start >= stop:
            return
        starts, stops = self._starts, self._stops
        first = bisect_right(stops, start)
        if first < len(starts) and starts[first] == start and stops[first] > stop:
            starts[first] = stop  # the usual case
            self.count -= stop - start
            return
        last = bisect_left(starts, stop)
        if first >= last:
            return
        left, right = starts[first], stops[last - 1]
        kept = [(a, b) for a, b in ((left, start), (stop, right)) if a < b]
        self.count -= sum(stops[first:last]) - sum(starts[first:last])
        self.count += sum(b - a for a, b in kept)
        starts[first:last] = [a for a, _ in kept]
        stops[first:last] = [b for _, b in kept]

    def covers(self, start: int, stop: int) -> bool:
        """Return whether all of ``start`` up to ``stop`` are in the set."""
        at = bisect_right(self._starts, start) - 1
        return start >= stop or (at >= 0 and self._stops[at] >= stop)

    def meets(self, start: int, stop: int) -> bool:
        """Return whether any of ``start`` up to ``stop`` is in the set."""
        at = bisect_right(self._stops, start)
        return start < stop and at < len(self._starts) and self._starts[at] < stop

    def gap(self, start: int) -> tuple[int, int | None]:
        """Return the first range of integers from ``start`` on that are not in the set; None: endless."""
        at = bisect_right(self._starts, start) - 1
        if at >= 0 and self._stops[at] > start:
            start = self._stops[at]
        after = at + 1
        return start, self._starts[after] if after < len(self._starts) else None

    def pop_first(self, most: int) -> tuple[int, int]:
        """Remove and return the first consecutive integers, at most ``most``."""
        start = self._starts[0]
        stop = min(self._stops[0], start + most)
        self.remove(start, stop)
        return start, stop


class Spans:
    """A set of samples: positions in partitions."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.partitions: dict[int, Ranges] = {}
        for span in spans:
            self.add(span)

    def __bool__(self) -> bool:
        return any(self.partitions.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __iter__(self) -> Iterator[Span]:
        for partition in sorted(self.partitions):
            for start, stop in self.partitions[partition]:
                yield Span(partition, start, stop)

    @property
    def spans(self) -> int:
        """Number of spans."""
        return sum(map(len, self.partitions.values()))

    @property
    def count(self) -> int:
        """Number of samples."""
        return sum(ranges.count for ranges in self.partitions.values())

    def of(self, partition: int) -> Ranges:
        """Return the positions in one partition."""
        found = self.partitions.get(partition)
        if found is None:
            found = self.partitions[partition] = Ranges()
        return found

    def add(self, span: Span) -> None:
        """Add samples."""
        self.of(span.partition).add(span.start, span.stop)

    def remove(self, span: Span) -> None:
        """Remove samples."""
        found = self.partitions.get(span.partition)
        if found is not None:
            found.remove(span.start, span.stop)
            if not found:
                del self.partitions[span.partition]

    def covers(self, span: Span) -> bool:
        """Return whether all of the samples are in the set."""
        found = self.partitions.get(span.partition)
        return span.start >= span.stop if found is None else found.covers(span.start, span.stop)

    def meets(self, span: Span) -> bool:
        """Return whether any of the samples is in the set."""
        found = self.partitions.get(span.partition)
        return found is not None and found.meets(span.start, span.stop)

    def packed(self) -> bytes:
        """Return the set as bytes: by partition, alternating lengths of gaps and ranges. A shard takes 2 to 6.

        Consecutive partitions with the same samples are one, with their number before the lengths.
        """
        partitions: dict[int, list[int]] = {}
        first, end, before = 0, -1, list[int]()
        for partition in sorted(self.partitions):
            numbers, last = [], 0
            for start, stop in self.partitions[partition]:
                numbers += [start - last, stop - start]
                last = stop
            if not numbers:
                continue
            if partition == end and numbers == before:
                partitions[first] = [partition + 1 - first, *numbers]
            else:
                first, before = partition, numbers
                partitions[partition] = numbers
            end = partition + 1
        return msgspec.msgpack.encode(partitions)

    @classmethod
    def unpacked(cls, data: bytes) -> Spans:
        """Return the set that `packed` encoded; an empty one for no bytes.

        Raises:
            ProtocolError: the bytes are no packed set.
        """
        found = cls()
        if not data:
            return found
        total = 0
        try:
            partitions = decoding.msgpack(data, dict[int, list[int]])
        except msgspec.DecodeError as error:
            raise ProtocolError(f"A set of samples cannot be read: {error}.") from error
        for partition, numbers in partitions.items():
            repeated = len(numbers) % 2
            count = numbers.pop(0) if repeated else 1
            total += count * len(numbers)
            wrong = partition < 0 or count < 1 or min(numbers, default=-repeated) < 0
            if wrong or total > MAX_UNPACKED:
                raise ProtocolError(
                    f"A set of samples has impossible spans in partition {partition}."
                )
            for number in range(partition, partition + count):
                position, ranges = 0, found.of(number)
                for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
                    ranges.add(position + gap, position + gap + length)
                    position += gap + length
        return found


class Part(NamedTuple):
    """Consecutive samples."""

    span: Span
    """Positions of the samples. In a stream there is one sample, at the end of the span."""
    items: Sequence[Any]
    """Inputs from which the source makes the samples."""

    def places(self) -> Iterator[tuple[Span, Any]]:
        """Yield each sample's own place and its input."""
        partition, start, stop = self.span.partition, self.span.start, self.span.stop
        if len(self.items) == 1:
            yield self.span, self.items[0]
            return
        for at, item in zip(range(start, stop), self.items, strict=True):
            yield Span(partition, at, at + 1), item

    def cut(self, count: int) -> tuple[Part, Part | None]:
        """Split into the first ``count`` samples and the rest, which is None if empty."""
        if count >= len(self.items):
            return self, None
        partition, middle = self.span.partition, self.span.start + count
        first = Part(Span(partition, self.span.start, middle), self.items[:count])
        return first, Part(Span(partition, middle, self.span.stop), self.items[count:])
