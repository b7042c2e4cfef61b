"""Parts of tensors: which of them overlap, and how a wanted part is put together from saved ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Numbers = tuple[int, ...]


class Extent(NamedTuple):
    """A box of a tensor: its place, size, and the size of the whole. One number for each dimension."""

    whole: Numbers
    at: Numbers
    shape: Numbers

    @property
    def elements(self) -> int:
        """How many there are in it."""
        return math.prod(self.shape)

    def fits(self) -> bool:
        """Whether the box lies in the whole."""
        return len(self.whole) == len(self.at) == len(self.shape) and all(
            at >= 0 and size >= 0 and at + size <= whole
            for whole, at, size in zip(self.whole, self.at, self.shape, strict=True)
        )


def entire(shape: Numbers) -> Extent:
    """The box that is the whole tensor."""
    return Extent(shape, (0,) * len(shape), shape)


class Box(NamedTuple):
    """What two extents share, as seen from each of them."""

    shape: Numbers
    in_source: Numbers
    in_target: Numbers


def overlap(source: Extent, target: Extent) -> Box | None:
    """The elements that both hold; None if there are none."""
    starts = tuple(map(max, source.at, target.at))
    ends = [
        min(a + m, b + n)
        for a, m, b, n in zip(source.at, source.shape, target.at, target.shape, strict=True)
    ]
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    if min(shape, default=1) <= 0:
        return None
    return Box(
        shape,
        tuple(start - at for start, at in zip(starts, source.at, strict=True)),
        tuple(start - at for start, at in zip(starts, target.at, strict=True)),
    )


@dataclass(frozen=True)
class Chunk:
    """One saved part of a tensor: entry ``index`` of what rank ``rank`` saved."""

    rank: int
    index: int
    extent: Extent


class Piece(NamedTuple):
    """What of a chunk goes where in the wanted part."""

    chunk: Chunk
    box: Box


class MissingPartError(Exception):
    """The saved chunks do not cover what is wanted."""


def pieces(wanted: Extent, chunks: Iterable[Chunk]) -> list[Piece]:
    """Cover ``wanted``; of equal chunks the first one is taken.

    Raises:
        MissingPartError: they do not cover it, or overlap; the message says how much is there.
    """
    found: list[Piece] = []
    seen: set[Extent] = set()
    covered = 0
    for chunk in chunks:
        if chunk.extent in seen or chunk.extent.whole != wanted.whole:
            continue
        seen.add(chunk.extent)
        box = overlap(chunk.extent, wanted)
        if box is not None:
            found.append(Piece(chunk, box))
            covered += math.prod(box.shape)
    if covered != wanted.elements:
        raise MissingPartError(f"{covered} of its {wanted.elements} elements were saved")
    return found


def starting_with(first: int, ranks: Sequence[int]) -> Iterator[int]:
    """The ranks, ``first`` at their head if it is one of them."""
    if first in ranks:
        yield first
    yield from (rank for rank in ranks if rank != first)
