"""What of a saved step a rank needs: from its own part where that is right, else from everybody's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlrover.checkpoint import extent, layout as layouts
from dlrover.checkpoint.extent import Chunk, Extent, Piece
from dlrover.checkpoint.layout import Tensor, extent_of, name
from dlrover.checkpoint.restore import Prepare, Reading, Restoration
from dlrover.errors import ConfigurationError, InfrastructureError


@dataclass(frozen=True)
class RankState:
    """What one rank saved."""

    tensors: Sequence[Tensor]
    skeleton: bytes
    sums: Sequence[int]
    """Of the tensors; empty if they are not known."""


@dataclass(frozen=True)
class Plan:
    """What to read, and what to do with it."""

    restoration: Restoration | Reading
    base: int
    """The saved rank whose skeleton is restored."""
    needed: list[list[Piece]]
    """The pieces of each of its tensors."""


def plan(
    prepare: Prepare,
    ranks: Mapping[int, RankState],
    *,
    base: int,
    moved: bool,
    complete: bool,
) -> Plan | None:
    """How to restore a step on one rank; None if more saved ranks must be known for it.

    Args:
        prepare: what is done with the saved tree.
        ranks: what is known of the saved ranks.
        base: the one of them whose plain values are restored.
        moved: whether another number of ranks loads than saved.
        complete: whether ``ranks`` are all.

    Raises:
        ConfigurationError: the saved state does not fit.
        InfrastructureError: a part of it was not saved.
    """
    mine = ranks.get(base)
    if mine is None:
        return None
    restoration = prepare(layouts.decode(mine.skeleton), mine.tensors, moved)
    wanted = restoration.wanted
    own = [extent_of(tensor.shape, tensor.part) for tensor in mine.tensors]
    if not moved and all(need in (None, has) for need, has in zip(wanted, own, strict=True)):
        needed = [
            [] if need is None else [_entire(base, index, need)]
            for index, need in enumerate(wanted)
        ]
        return Plan(restoration, base, needed)
    if not complete:
        return None
    known = _Chunks(ranks, base)
    needed = []
    for index, (tensor, need, has) in enumerate(zip(mine.tensors, wanted, own, strict=True)):
        if need is None:
            needed.append([])
        elif need == has and not moved:
            needed.append([_entire(base, index, has)])
        else:
            if tensor.part is None:
                known.check_equal(tensor, mine.sums[index])
            needed.append(known.pieces(tensor, need))
    return Plan(restoration, base, needed)


def _entire(rank: int, index: int, has: Extent) -> Piece:
    start = (0,) * len(has.shape)
    return Piece(Chunk(rank, index, has), extent.Box(has.shape, start, start))


class _Chunks:
    """All saved parts, by the paths of their tensors."""

    def __init__(self, ranks: Mapping[int, RankState], base: int) -> None:
        self._found: dict[layouts.Path, list[tuple[Chunk, Tensor, int]]] = {}
        for rank in extent.starting_with(base, sorted(ranks)):
            sums = ranks[rank].sums
            for index, tensor in enumerate(ranks[rank].tensors):
                chunk = Chunk(rank, index, extent_of(tensor.shape, tensor.part))
                self._found.setdefault(tensor.path, []).append((chunk, tensor, sums[index]))

    def _of(self, tensor: Tensor) -> Iterator[tuple[Chunk, int]]:
        for chunk, other, checksum in self._found[tensor.path]:
            if other.dtype == tensor.dtype:
                yield chunk, checksum

    def check_equal(self, tensor: Tensor, checksum: int) -> None:
        """Refuse a tensor of which each rank has saved its own."""
        if any(other != checksum for _, other in self._of(tensor)):
            raise ConfigurationError(
                f"Each rank saved another tensor {name(tensor.path)}, so another number of ranks cannot load"
                f" it; name its key in local= if it belongs to a rank: {tensor.path[0]!r}."
            )

    def pieces(self, tensor: Tensor, wanted: Extent) -> list[Piece]:
        """Cover what is wanted of a tensor."""
        parts: dict[Extent, int] = {}
        for chunk, checksum in self._of(tensor):
            if parts.setdefault(chunk.extent, checksum) != checksum:
                raise ConfigurationError(
                    f"Several ranks saved the same part of the tensor {name(tensor.path)}, with other"
                    " content; so it cannot be loaded in other parts."
                )
        try:
            return extent.pieces(wanted, [chunk for chunk, _ in self._of(tensor)])
        except extent.MissingPartError as error:
            raise InfrastructureError(f"Of the tensor {name(tensor.path)} {error}.") from error
