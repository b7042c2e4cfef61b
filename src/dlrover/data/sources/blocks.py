"""Records that are read in blocks: row groups of files, pages of tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

Block = TypeVar("Block")
Record = TypeVar("Record")

SHARDS = 100
"""Minimum number of shards in a dataset in blocks, unless the shard size is set."""
SMALLEST = 100
"""Records in a shard from which on aligning shards with blocks pays off."""


@runtime_checkable
class InBlocks(Protocol):
    """A source that reads blocks, or a wrapper of one.

    Its records are shuffled block by block, and within each: a block is then read once, not once per record.
    """

    blocks: Sequence[int]
    """Number of records in each block."""


class BlockRecords(ABC, Generic[Block, Record]):
    """Records of blocks. Each process keeps the blocks that it read last."""

    def __init__(self, blocks: Sequence[int], kept: int) -> None:
        self.blocks = list(blocks)
        self._ends = list(accumulate(self.blocks))
        self._kept = kept
        self._read_last: OrderedDict[int, Block] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Record:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        block = self._read_last.pop(number, None)
        if block is None:
            block = self._read(number)
        self._read_last[number] = block
        while len(self._read_last) > self._kept:
            self._read_last.popitem(last=False)
        return self._record(block, index - self._ends[number] + self.blocks[number])

    @abstractmethod
    def _read(self, number: int) -> Block:
        """Read one block."""

    @abstractmethod
    def _record(self, block: Block, at: int) -> Record:
        """Return one of a block's records."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read_last": OrderedDict()}


def shard_of(blocks: Sequence[int]) -> int | None:
    """Return a number of records per shard so that shards end where blocks end; None if no number fits.

    It divides the most frequent block size, and gives at least `SHARDS` shards.
    """
    if not blocks:
        return None
    counts: dict[int, int] = {}
    for size in blocks:
        counts[size] = counts.get(size, 0) + 1
    usual = max(counts, key=lambda size: (counts[size], size))
    most = min(usual, sum(blocks) // SHARDS)
    parts = range(-(-usual // most), usual // SMALLEST + 1) if most else range(0)
    return next((usual // count for count in parts if usual % count == 0), None)
