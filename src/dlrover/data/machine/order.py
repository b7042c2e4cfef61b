"""Shuffling without a list: a mapping of position to record that is the same on every machine.

The positions form a grid that is barely larger than their number. A Feistel network moves rows and columns
in turn, each by a number that depends on the other; the result is a permutation of the grid. A position
that it moves beyond the records is moved again until it is a record (cycle walking; Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). This takes no memory, and some tenths of a microsecond per
record in large batches with numpy, some microseconds without.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, groupby, islice
from typing import Any, TypeAlias

from dlrover.spec.requests.shards import Span

ROUNDS = 3
"""Number of times that rows and columns are moved."""
BATCH = 24
"""Number of positions from which a batch is faster with numpy."""
_MASK = (1 << 64) - 1
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_STEP = 0x9E3779B97F4A7C15


def _mixed(value: Any, factors: Any = _FACTORS, mask: Any = _MASK) -> Any:
    """Apply SplitMix64's finisher (Steele, Lea and Flood, 2014) to a number or a numpy array."""
    value = ((value ^ (value >> 30)) * factors[0]) & mask
    value = ((value ^ (value >> 27)) * factors[1]) & mask
    return value ^ (value >> 31)


@functools.cache
def _numpy() -> Any:
    try:
        import numpy  # noqa: ICN001, PLC0415 - the bare package works without
    except ImportError:
        return None
    return numpy


class Shuffled:
    """Permutation of ``range(size)`` that depends only on the arguments."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        self._rows = math.isqrt(max(0, size - 1)) + 1
        self._columns = -(-max(1, size) // self._rows)
        state = _mixed((seed & _MASK) ^ _mixed(epoch + 1))
        keys = [_mixed(state + number * _STEP & _MASK) for number in range(2 * ROUNDS)]
        self._keys = list(zip(keys[::2], keys[1::2], strict=True))

    def record(self, position: int) -> int:
        """Return the record of one position."""
        rows, columns = self._rows, self._columns
        while True:
            row, column = divmod(position, columns)
            for first, second in self._keys:
                row = (row + (_mixed(column ^ first) >> 1)) % rows
                column = (column + (_mixed(row ^ second) >> 1)) % columns
            position = row * columns + column
            if position < self._size:
                return position

    def records(self, positions: Sequence[int]) -> list[int]:
        """Return the records of many positions."""
        numpy = _numpy()
        if numpy is None or len(positions) < BATCH:
            return [self.record(position) for position in positions]
        number = numpy.uint64
        if isinstance(positions, range):  # avoids a Python number for each
            steps = numpy.arange(len(positions), dtype=number)
            array = number(positions.start) + steps * number(positions.step)
        else:
            array = numpy.array(positions, dtype=number)
        found = self._moved(numpy, array)
        beyond = numpy.flatnonzero(found >= self._size)
        while len(beyond):
            found[beyond] = self._moved(numpy, found[beyond])
            beyond = beyond[found[beyond] >= self._size]
        records: list[int] = found.tolist()
        return records

    def _moved(self, numpy: Any, positions: Any) -> Any:
        """Run `record`'s loop once, for an array."""
        number = numpy.uint64
        factors, mask, one = [number(factor) for factor in _FACTORS], number(_MASK), number(1)
        rows, columns = number(self._rows), number(self._columns)
        row, column = numpy.divmod(positions, columns)
        for first, second in self._keys:
            row = (row + (_mixed(column ^ number(first), factors, mask) >> one)) % rows
            column = (column + (_mixed(row ^ number(second), factors, mask) >> one)) % columns
        return row * columns + column


class ShuffledInBlocks:
    """Permutation of records that are read in blocks: it shuffles the blocks, and the records within each.

    Args:
        blocks: number of records in each block.
        seed: seed of the order.
        epoch: each epoch has another order.
    """

    def __init__(self, blocks: Sequence[int], seed: int, epoch: int) -> None:
        self._blocks, self._seed, self._epoch = blocks, seed, epoch
        self._turn = Shuffled(len(blocks), seed, epoch).records(range(len(blocks)))
        self._starts = list(accumulate(blocks, initial=0))
        self._ends = list(accumulate(blocks[block] for block in self._turn))
        self._within = functools.lru_cache(maxsize=4)(self._order_within)

    def record(self, position: int) -> int:
        """Return the record of one position."""
        return self.records([position])[0]

    def records(self, positions: Sequence[int]) -> list[int]:
        """Return the records of many positions."""
        found: list[int] = []
        at = 0
        while at < len(positions):
            place = bisect_right(self._ends, positions[at])
            block, end = self._turn[place], self._ends[place]
            begin = end - self._blocks[block]
            inside = []
            while at < len(positions) and begin <= positions[at] < end:
                inside.append(positions[at] - begin)
                at += 1
            start = self._starts[block]
            found += [start + record for record in self._within(block).records(inside)]
        return found

    def _order_within(self, block: int) -> Shuffled:
        seed = _mixed((self._seed & _MASK) ^ _mixed(block + 1))
        return Shuffled(self._blocks[block], seed, self._epoch)


_Order: TypeAlias = Shuffled | ShuffledInBlocks


class EpochOrders:
    """The records of a dataset in each of its epochs, in the order of the source or shuffled.

    Args:
        size: number of records.
        blocks: number of records in each block, of a source that is read in blocks.
        seed: seed of the order.
        shuffle: use another order in each epoch instead of the source's.
    """

    def __init__(
        self, size: int, blocks: Sequence[int] | None, seed: int, *, shuffle: bool
    ) -> None:
        self._size, self._blocks, self._seed, self._shuffle = size, blocks, seed, shuffle
        self._shuffled: dict[int, _Order] = {}

    @property
    def name(self) -> str:
        """Name of the order, in which workers must agree."""
        if not self._shuffle:
            return "as in the source"
        blocks = f" in {len(self._blocks)} blocks" if self._blocks is not None else ""
        return f"shuffled{blocks} with seed {self._seed}"

    def record(self, epoch: int, position: int) -> int:
        """Return the number, in the source, of the record at a position of an epoch."""
        return self._order(epoch).record(position) if self._shuffle else position

    def records_of(self, spans: Sequence[Span]) -> Iterator[Sequence[int]]:
        """Yield the records of each span; consecutive spans of an epoch are looked up together."""
        if not self._shuffle:
            yield from (range(span.start, span.stop) for span in spans)
            return
        for epoch, of_epoch in groupby(spans, key=lambda span: span.partition):
            ranges = [range(span.start, span.stop) for span in of_epoch]
            positions = ranges[0] if len(ranges) == 1 else list(chain.from_iterable(ranges))
            records = iter(self._order(epoch).records(positions))
            yield from (list(islice(records, len(each))) for each in ranges)

    def _order(self, epoch: int) -> _Order:
        found = self._shuffled.get(epoch)
        if found is None:
            if len(self._shuffled) > 2:
                self._shuffled.clear()
            if self._blocks is not None:
                found = ShuffledInBlocks(self._blocks, self._seed, epoch)
            else:
                found = Shuffled(self._size, self._seed, epoch)
            self._shuffled[epoch] = found
        return found
