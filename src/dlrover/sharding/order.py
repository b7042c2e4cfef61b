"""Shuffling without a list: position to record, and the same on every machine.

A Feistel network over as many bits as the number of records has is a permutation; what it moves beyond the
records is moved on until it is one (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). It takes no memory and a few microseconds a record, whatever the size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

ROUNDS = 6
_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """SplitMix64's finisher (Steele, Lea and Flood, 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def straight(position: int) -> int:
    """The order in which the records lie."""
    return position


def shuffled(size: int, seed: int, epoch: int) -> Callable[[int], int]:
    """A permutation of ``range(size)`` that depends on nothing but the arguments."""
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    state = _mixed((seed & _MASK) ^ _mixed(epoch + 1))
    keys = [_mixed(state + number * 0x9E3779B97F4A7C15 & _MASK) for number in range(ROUNDS)]

    def record(position: int) -> int:
        while True:
            left, right = position >> half, position & mask
            for key in keys:
                left, right = right, left ^ (_mixed(right ^ key) & mask)
            position = left << half | right
            if position < size:
                return position

    return record


def shuffled_in_blocks(blocks: Sequence[int], seed: int, epoch: int) -> Callable[[int], int]:
    """The same for records that are read in blocks: blocks in another order, and records within each.

    Args:
        blocks: how many records each block has.
        seed: of the order.
        epoch: it is another one in each.
    """
    turned = shuffled(len(blocks), seed, epoch)
    turn = [turned(place) for place in range(len(blocks))]
    starts = list(accumulate(blocks, initial=0))
    ends = list(accumulate(blocks[block] for block in turn))
    within: tuple[int, Callable[[int], int]] = -1, straight

    def record(position: int) -> int:
        nonlocal within
        place = bisect_right(ends, position)
        block = turn[place]
        if within[0] != block:
            within = (
                block,
                shuffled(blocks[block], _mixed((seed & _MASK) ^ _mixed(block + 1)), epoch),
            )
        return starts[block] + within[1](position - ends[place] + blocks[block])

    return record
