"""Parts of tensors: their overlaps, and the assembly of a wanted part from saved ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from dlrover.errors import InfrastructureError

Numbers = tuple[int, ...]
_Source = TypeVar("_Source")


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

    @property
    def source(self) -> tuple[slice, ...]:
        """The slices that select the overlap in the source."""
        return _slices(self.in_source, self.shape)

    @property
    def target(self) -> tuple[slice, ...]:
        """The slices that select the overlap in the target."""
        return _slices(self.in_target, self.shape)


def _slices(start: Numbers, shape: Numbers) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))


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


class Piece(NamedTuple):
    """A part of a saved tensor, and its position in the wanted part."""

    rank: int
    """The rank that saved the tensor."""
    entry: int
    """The number of the tensor among those of the rank."""
    box: Box


def cover(
    subject: str, wanted: Extent, parts: Iterable[tuple[Extent, _Source]]
) -> list[tuple[_Source, Box]]:
    """Cover the wanted part of a tensor with saved parts; of equal ones, use the first.

    Raises:
        InfrastructureError: the parts do not cover it, or overlap. The message says that ``subject`` is incomplete.
    """
    found: list[tuple[_Source, Box]] = []
    seen: set[Extent] = set()
    covered = 0
    for extent, source in parts:
        if extent in seen or extent.whole != wanted.whole:
            continue
        seen.add(extent)
        box = overlap(extent, wanted)
        if box is not None:
            found.append((source, box))
            covered += math.prod(box.shape)
    if covered != wanted.elements:
        raise InfrastructureError(
            f"{subject} is incomplete: {covered} of its {wanted.elements} elements were saved."
        )
    return found


def starting_with(first: int, ranks: Sequence[int]) -> Iterator[int]:
    """Yield the ranks, starting with ``first`` if it is one of them."""
    if first in ranks:
        yield first
    yield from (rank for rank in ranks if rank != first)
