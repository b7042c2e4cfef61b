"""The parts of a saved step that a rank needs: its own part if that fits, else parts of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dlrover.checkpoint.loading.restore import Copy, Prepare, Reading, Restoration
from dlrover.checkpoint.machine import extent, layout as layouts
from dlrover.checkpoint.machine.extent import Chunk, Extent, Piece
from dlrover.checkpoint.machine.layout import Tensor, extent_of, name
from dlrover.errors import ConfigurationError, InfrastructureError


@dataclass(frozen=True)
class RankState:
    """The state that one rank saved."""

    tensors: Sequence[Tensor]
    skeleton: bytes
    sums: Sequence[int]
    """Checksums of the tensors; empty if they are not known."""


@dataclass(frozen=True)
class Plan:
    """The pieces to read, and the restoration that uses them."""

    restoration: Restoration | Reading | Taking
    base: int
    """Saved rank whose plain values are restored."""
    tensors: Sequence[Tensor]
    """Tensors to restore: those that rank ``base`` saved, or the chosen parts of saved ones."""
    needed: list[list[Piece]] | None
    """Pieces of each tensor; None if all tensors are just as rank ``base`` saved them."""

    @property
    def pieces(self) -> Iterator[Piece]:
        """All pieces of all tensors."""
        return itertools.chain.from_iterable(self.needed or ())


@dataclass(frozen=True)
class Question:
    """Everything that decides how a step is restored on this rank."""

    ranks: Mapping[int, RankState]
    """The known states of saved ranks, by rank."""
    base: int
    """Saved rank whose plain values are restored."""
    moved: bool
    """True if the number of ranks that load differs from the number that saved."""
    complete: bool
    """True if ``ranks`` holds all saved ranks."""
    own: bool = False
    """True if the part of ``base`` can be read here, even if other ranks are known."""
    size: int = 1
    """Number of ranks that saved."""


Planner = Callable[[Question], Plan | None]
"""Returns the plan for a step; None if more saved ranks must be known."""


def restoring(prepare: Prepare, question: Question) -> Plan | None:
    """Plan how to restore all of a step; return None if more saved ranks must be known.

    Args:
        prepare: turns the saved tree into a restoration.
        question: the step to restore.

    Raises:
        ConfigurationError: the saved state does not fit.
        InfrastructureError: a part of the state was not saved.
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
    """Return the pieces of each tensor, from any saved rank."""
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
    """Plan how to restore from what rank ``base`` saved; return None if that is not enough."""
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
    """A part of a saved tensor, and the tensor that receives it. It also is a `Tensor`."""

    path: layouts.Path
    dtype: str
    extent: Extent
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return self.extent.shape

    @property
    def part(self) -> layouts.Part:
        """Position of the part in the whole tensor."""
        return layouts.Part(self.extent.whole, self.extent.at, -1)


class Taking:
    """A restoration that copies parts of saved tensors to given targets."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self.wanted: list[Extent | None] = [target.extent for target in targets]

    def run(self, tensors: Sequence[torch.Tensor], copy: Copy = torch._foreach_copy_) -> None:
        """Copy the parts to their targets."""
        targets = [target.tensor for target in self._targets]
        if targets:
            with torch.no_grad():
                copy(targets, tensors)


def taking(
    choose: Callable[[Mapping[int, RankState]], Sequence[Target]], question: Question
) -> Plan | None:
    """Plan how to get parts of tensors from any saved ranks; return None if not all ranks are known.

    Args:
        choose: returns the targets for a step, given all its ranks.
        question: the step to read.

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
    """All saved parts of tensors, by path."""

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
        """Refuse a tensor whose content differs between ranks."""
        if any(other != checksum for _, other in self._of(tensor)):
            raise ConfigurationError(
                f"Each rank saved another tensor {name(tensor.path)}, so another number of ranks cannot load"
                f" it; name its key in local= if it belongs to a rank: {tensor.path[0]!r}."
            )

    def pieces(self, tensor: Tensor, wanted: Extent) -> list[Piece]:
        """Return pieces that cover the wanted part of a tensor."""
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
