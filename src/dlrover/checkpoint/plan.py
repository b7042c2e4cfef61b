"""What of a saved step a rank needs: from its own part where that is right, else from everybody's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dlrover.checkpoint import extent, layout as layouts
from dlrover.checkpoint.extent import Chunk, Extent, Piece
from dlrover.checkpoint.layout import Tensor, extent_of, name
from dlrover.checkpoint.restore import Copy, Prepare, Reading, Restoration
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

    restoration: Restoration | Reading | Taking
    base: int
    """The saved rank whose plain values are restored."""
    tensors: Sequence[Tensor]
    """What is restored: what that rank saved, or parts of it."""
    needed: list[list[Piece]] | None
    """The pieces of each of them; None: they are all as the rank ``base`` saved them."""

    @property
    def pieces(self) -> Iterator[Piece]:
        """All pieces."""
        return itertools.chain.from_iterable(self.needed or ())


@dataclass(frozen=True)
class Question:
    """How is a step to be restored on this rank?"""

    ranks: Mapping[int, RankState]
    """What is known of the saved ranks."""
    base: int
    """The one of them whose plain values are restored."""
    moved: bool
    """Whether another number of ranks loads than saved."""
    complete: bool
    """Whether ``ranks`` are all."""
    own: bool = False
    """Whether what ``base`` saved can be read here, though more is known."""
    size: int = 1
    """How many ranks saved."""


Planner = Callable[[Question], Plan | None]
"""None: more saved ranks must be known."""


def restoring(prepare: Prepare, question: Question) -> Plan | None:
    """How to restore all of a step; None if more saved ranks must be known for it.

    Args:
        prepare: what is done with the saved tree.
        question: the step.

    Raises:
        ConfigurationError: the saved state does not fit.
        InfrastructureError: a part of it was not saved.
    """
    ranks, base, moved = question.ranks, question.base, question.moved
    mine = ranks.get(base)
    if mine is None:
        return None
    restoration = prepare(layouts.decode(mine.skeleton), mine.tensors, moved)
    from_all = restoration.needs_ranks
    if from_all:
        if len(ranks) < question.size:
            return None
        restoration.know([layouts.decode(ranks[rank].skeleton) for rank in sorted(ranks)])
    if not moved and (not question.complete or (from_all and question.own)):
        found = _own(restoration, base, mine)
        if found is not None:
            return found
    if not question.complete:
        return None
    return Plan(restoration, base, mine.tensors, _from_anybody(restoration, question, mine))


def _from_anybody(
    restoration: Restoration | Reading, question: Question, mine: RankState
) -> list[list[Piece]]:
    """The pieces of each tensor, whoever saved them."""
    known = _Chunks(question.ranks, question.base)
    needed: list[list[Piece]] = []
    for index, (tensor, need) in enumerate(zip(mine.tensors, restoration.wanted, strict=True)):
        has = extent_of(tensor.shape, tensor.part)
        if need is None:
            needed.append([])
        elif need == has and not question.moved:
            needed.append([_entire(question.base, index, has)])
        else:
            if tensor.part is None:
                known.check_equal(tensor, mine.sums[index])
            needed.append(known.pieces(tensor, need))
    return needed


def _own(restoration: Restoration | Reading, base: int, mine: RankState) -> Plan | None:
    """How to restore from what the same rank saved; None if it needs more."""
    if restoration.as_saved:
        return Plan(restoration, base, mine.tensors, None)
    own = [extent_of(tensor.shape, tensor.part) for tensor in mine.tensors]
    if all(need in (None, has) for need, has in zip(restoration.wanted, own, strict=True)):
        needed = [
            [] if need is None else [_entire(base, index, need)]
            for index, need in enumerate(restoration.wanted)
        ]
        return Plan(restoration, base, mine.tensors, needed)
    return None


@dataclass(frozen=True)
class Target:
    """A part of a saved tensor, and where it is to go. It is a `Tensor` too."""

    path: layouts.Path
    dtype: str
    extent: Extent
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return self.extent.shape

    @property
    def part(self) -> layouts.Part:
        """Where it lies in the whole."""
        return layouts.Part(self.extent.whole, self.extent.at, -1)


class Taking:
    """Parts of saved tensors, copied to where they are wanted."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self.wanted: list[Extent | None] = [target.extent for target in targets]

    def run(self, tensors: Sequence[torch.Tensor], copy: Copy = torch._foreach_copy_) -> None:
        """Copy them."""
        targets = [target.tensor for target in self._targets]
        if targets:
            with torch.no_grad():
                copy(targets, tensors)


def taking(
    choose: Callable[[Mapping[int, RankState]], Sequence[Target]], question: Question
) -> Plan | None:
    """How to get parts of tensors, whichever ranks saved them; None if not all ranks are known.

    Args:
        choose: what is wanted of a step, all of whose ranks are known.
        question: the step.

    Raises:
        InfrastructureError: a part was not saved.
    """
    if not question.complete:
        return None
    targets = choose(question.ranks)
    known = _Chunks(question.ranks, question.base)
    needed = [known.pieces(target, target.extent) for target in targets]
    return Plan(Taking(targets), question.base, targets, needed)


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
        for chunk, other, checksum in self._found.get(tensor.path, ()):
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
