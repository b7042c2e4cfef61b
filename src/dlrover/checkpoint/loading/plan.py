"""The parts of a saved step that a rank needs: its own part if that fits, else parts of all ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dlrover.checkpoint.engine.buffers import joined, overwrite
from dlrover.checkpoint.loading.replay import Replay
from dlrover.checkpoint.loading.restore import Prepare, Restoration, StateReading
from dlrover.checkpoint.machine import extent, layout as layouts
from dlrover.checkpoint.machine.extent import Box, Extent, Piece, cover
from dlrover.checkpoint.machine.layout import TensorSpec, name
from dlrover.errors import ConfigurationError


@dataclass(frozen=True)
class RankState:
    """The state that one rank saved."""

    tensors: Sequence[TensorSpec]
    skeleton: bytes
    sums: Sequence[int]
    """Checksums of the tensors; empty if they are not known."""


@dataclass(frozen=True)
class LoadPlan:
    """The pieces to read, and the restoration that uses them."""

    restoration: Restoration | StateReading | PartialLoad | Replay
    base: int
    """Saved rank whose plain values are restored."""
    tensors: Sequence[TensorSpec]
    """Tensors to restore: those that rank ``base`` saved, or the chosen parts of saved ones."""
    needed: list[list[Piece]] | None
    """Pieces of each tensor; None if all tensors are just as rank ``base`` saved them."""

    @property
    def pieces(self) -> Iterator[Piece]:
        """All pieces of all tensors."""
        return itertools.chain.from_iterable(self.needed or ())


@dataclass(frozen=True)
class LoadRequest:
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


Read = Callable[[Piece], torch.Tensor]
"""Returns the elements of a piece."""

Planner = Callable[[LoadRequest], LoadPlan | None]
"""Returns the plan for a step; None if more saved ranks must be known."""


def restoring(prepare: Prepare, request: LoadRequest) -> LoadPlan | None:
    """Plan how to restore all of a step; return None if more saved ranks must be known.

    Args:
        prepare: turns the saved tree into a restoration.
        request: the step to restore.

    Raises:
        ConfigurationError: the saved state does not fit.
        InfrastructureError: a part of the state was not saved.
    """
    ranks, base, moved = request.ranks, request.base, request.moved
    mine = ranks.get(base)
    if mine is None:
        return None
    restoration = prepare(layouts.decode(mine.skeleton), mine.tensors, moved)
    from_all = restoration.needs_ranks
    if from_all:
        if len(ranks) < request.size:
            return None
        restoration.know([layouts.decode(ranks[rank].skeleton) for rank in sorted(ranks)])
    if not moved and (not request.complete or (from_all and request.own)):
        found = _own(restoration, base, mine)
        if found is not None:
            return found
    if not request.complete:
        return None
    return LoadPlan(restoration, base, mine.tensors, _from_anybody(restoration, request, mine))


def _from_anybody(
    restoration: Restoration | StateReading, request: LoadRequest, mine: RankState
) -> list[list[Piece]]:
    """Return the pieces of each tensor, from any saved rank."""
    known = _SavedTensors(request.ranks, request.base)
    needed: list[list[Piece]] = []
    for index, (tensor, need) in enumerate(zip(mine.tensors, restoration.wanted, strict=True)):
        has = tensor.extent
        if need is None:
            needed.append([])
        elif need == has and (not request.moved or index in restoration.varying):
            needed.append([_entire(request.base, index, has)])
        else:
            if tensor.part is None:
                known.check_equal(tensor, mine.sums[index])
            needed.append(known.pieces(tensor, need))
    return needed


def _own(restoration: Restoration | StateReading, base: int, mine: RankState) -> LoadPlan | None:
    """Plan how to restore from what rank ``base`` saved; return None if that is not enough."""
    if restoration.as_saved:
        return LoadPlan(restoration, base, mine.tensors, None)
    own = [tensor.extent for tensor in mine.tensors]
    if all(need in (None, has) for need, has in zip(restoration.wanted, own, strict=True)):
        needed = [
            [] if need is None else [_entire(base, index, need)]
            for index, need in enumerate(restoration.wanted)
        ]
        return LoadPlan(restoration, base, mine.tensors, needed)
    return None


class Target(TensorSpec, frozen=True):
    """A part of a saved tensor, and the tensor that receives it."""

    tensor: torch.Tensor


class PartialLoad:
    """A restoration that copies parts of saved tensors to given targets."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self.wanted: list[Extent | None] = [target.extent for target in targets]

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the parts to their targets."""
        targets = [target.tensor for target in self._targets]
        if targets:
            overwrite(targets, tensors)


def taking(
    choose: Callable[[Mapping[int, RankState]], Sequence[Target] | None], request: LoadRequest
) -> LoadPlan | None:
    """Plan how to get parts of tensors from any saved ranks; return None if more ranks must be known.

    Args:
        choose: returns the targets for a step, given all its ranks, or one where all are alike; None if it
            needs all.
        request: the step to read.

    Raises:
        InfrastructureError: a part was not saved.
    """
    if not request.complete:
        return None
    targets = choose(request.ranks)
    if targets is None:
        return None
    known = _SavedTensors(request.ranks, request.base)
    needed = [known.pieces(target, target.extent) for target in targets]
    return LoadPlan(PartialLoad(targets), request.base, targets, needed)


def _entire(rank: int, index: int, has: Extent) -> Piece:
    start = (0,) * len(has.shape)
    return Piece(rank, index, Box(has.shape, start, start))


class _SavedTensors:
    """All saved parts of tensors, by path."""

    def __init__(self, ranks: Mapping[int, RankState], base: int) -> None:
        self._found: dict[layouts.Path, list[tuple[tuple[int, int], TensorSpec, int]]] = {}
        for rank in extent.starting_with(base, sorted(ranks)):
            sums = ranks[rank].sums
            for index, tensor in enumerate(ranks[rank].tensors):
                part = (rank, index), tensor, sums[index]
                self._found.setdefault(tensor.path, []).append(part)

    def _of(self, tensor: TensorSpec) -> Iterator[tuple[tuple[int, int], Extent, int]]:
        for key, other, checksum in self._found.get(tensor.path, ()):
            if other.dtype == tensor.dtype:
                yield key, other.extent, checksum

    def check_equal(self, tensor: TensorSpec, checksum: int) -> None:
        """Refuse a tensor whose content differs between ranks."""
        if any(other != checksum for _, _, other in self._of(tensor)):
            raise ConfigurationError(
                f"Each rank saved another tensor {name(tensor.path)}, so another number of ranks cannot load"
                f" it; name its key in local= if it belongs to a rank: {tensor.path[0]!r}."
            )

    def pieces(self, tensor: TensorSpec, wanted: Extent) -> list[Piece]:
        """Return pieces that cover the wanted part of a tensor."""
        sums: dict[Extent, int] = {}
        for _, part, checksum in self._of(tensor):
            if sums.setdefault(part, checksum) != checksum:
                raise ConfigurationError(
                    f"Several ranks saved the same part of the tensor {name(tensor.path)}, with other"
                    " content; so it cannot be loaded in other parts."
                )
        parts = [(part, key) for key, part, _ in self._of(tensor)]
        return [
            Piece(*key, box) for key, box in cover(f"The tensor {name(tensor.path)}", wanted, parts)
        ]


def assemble(
    planned: LoadPlan, needed: Sequence[Sequence[Piece]], read: Read
) -> list[torch.Tensor]:
    """Return the wanted part of each tensor; where one piece covers it, return that piece without a copy."""
    return [
        joined(
            tensor.dtype,
            (0,) if wanted is None else wanted.shape,
            [(piece.box, functools.partial(read, piece)) for piece in pieces],
        )
        for tensor, wanted, pieces in zip(
            planned.tensors, planned.restoration.wanted, needed, strict=True
        )
    ]
