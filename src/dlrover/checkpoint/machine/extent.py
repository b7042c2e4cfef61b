"""Parts of tensors: their overlaps, and the assembly of a wanted part from saved ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Numbers = tuple[int, ...]


class Extent(NamedTuple):
    """A box in a tensor: size of the whole, position and size, with one number per dimension."""

    whole: Numbers
    at: Numbers
    shape: Numbers

    @property
    def elements(self) -> int:
        """The number of elements in the box."""
        return math.prod(self.shape)

    def fits(self) -> bool:
        """Return whether the box lies within the whole."""
        return len(self.whole) == len(self.at) == len(self.shape) and all(
            at >= 0 and size >= 0 and at + size <= whole
            for whole, at, size in zip(self.whole, self.at, self.shape, strict=True)
        )


def entire(shape: Numbers) -> Extent:
    """Return the box that covers the whole tensor."""
    return Extent(shape, (0,) * len(shape), shape)


class Box(NamedTuple):
    """The overlap of two extents: its shape, and its position in each of them."""

    shape: Numbers
    in_source: Numbers
    in_target: Numbers


def overlap(source: Extent, target: Extent) -> Box | None:
    """Return the overlap of two extents; None if they share no element."""
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
    """A part of a chunk, and its position in the wanted part."""

    chunk: Chunk
    box: Box


class MissingPartError(Exception):
    """The saved chunks do not cover what is wanted."""


def pieces(wanted: Extent, chunks: Iterable[Chunk]) -> list[Piece]:
    """Cover ``wanted`` with chunks; of equal chunks, use the first one.

    Raises:
        MissingPartError: the chunks do not cover it, or overlap; the message says how much is there.
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
    """Yield the ranks, starting with ``first`` if it is one of them."""
    if first in ranks:
        yield first
    yield from (rank for rank in ranks if rank != first)
