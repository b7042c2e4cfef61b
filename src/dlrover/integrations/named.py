"""A state as other libraries describe it: parts of tensors, and objects, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dlrover.checkpoint.engine.checkpointer import Checkpointer, LoadRecord
from dlrover.checkpoint.engine.tree import DTYPES, Shard, State
from dlrover.checkpoint.loading.plan import RankState, Target
from dlrover.checkpoint.machine import extent, layout as layouts
from dlrover.checkpoint.machine.extent import Chunk, Extent
from dlrover.errors import ConfigurationError, InfrastructureError

_TENSORS, _WHOLES, _OBJECTS = "tensors", "wholes", "objects"


def by_tensors(parts: Iterable[tuple[str, Shard]], objects: Mapping[str, Any]) -> State:
    """Return the state that this rank saves, if it has at most one part of each tensor.

    Raises:
        ConfigurationError: it has several parts of a tensor.
    """
    tensors: dict[str, Shard] = {}
    for name, part in parts:
        if name in tensors:
            raise ConfigurationError(f"This rank has several parts of the tensor {name}.")
        tensors[name] = part
    return {_TENSORS: tensors, _WHOLES: {}, _OBJECTS: dict(objects)}


def by_chunks(parts: Iterable[tuple[str, Shard]], objects: Mapping[str, Any]) -> State:
    """Return the state that this rank saves, with each of its parts as a separate tensor."""
    tensors: dict[str, dict[str, Shard]] = {}
    wholes: dict[str, list[int]] = {}
    for name, part in parts:
        shape = tuple(part.tensor.shape)
        alone = Shard(part.tensor, shape, (0,) * len(shape))
        tensors.setdefault(name, {})[".".join(map(str, part.at))] = alone
        wholes[name] = list(part.whole)
    return {_TENSORS: tensors, _WHOLES: wholes, _OBJECTS: dict(objects)}


class Wanted(NamedTuple):
    """A wanted part of a saved tensor, and the tensor to copy it to."""

    name: str
    extent: Extent
    tensor: torch.Tensor


class Saved:
    """One step as all ranks saved it; raises `ConfigurationError` if it was not saved by name."""

    def __init__(self, ranks: Mapping[int, RankState]) -> None:
        self._ranks = ranks
        self.objects: dict[str, Any] = {}
        """The objects of all ranks, by name."""
        self.chunks: dict[str, list[Chunk]] = {}
        """The parts of each tensor, by name."""
        for rank, state in ranks.items():
            tree = layouts.decode(state.skeleton)
            if not isinstance(tree, dict) or tree.keys() != {_TENSORS, _WHOLES, _OBJECTS}:
                raise ConfigurationError("The checkpoint was saved in another way than by names.")
            self.objects.update(tree[_OBJECTS])
            for index, tensor in enumerate(state.tensors):
                name = str(tensor.path[1])
                box = _place(tensor, tree[_WHOLES].get(name, ()))
                self.chunks.setdefault(name, []).append(Chunk(rank, index, box))

    def dtype(self, name: str) -> torch.dtype:
        """Return the element type of a tensor."""
        chunk = self.chunks[name][0]
        return DTYPES[self._ranks[chunk.rank].tensors[chunk.index].dtype]

    def whole(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.chunks[name][0].extent.whole

    def targets(self, wanted: Wanted) -> Iterator[Target]:
        """Yield which saved parts go where.

        Raises:
            InfrastructureError: a part was not saved.
        """
        try:
            pieces = extent.pieces(wanted.extent, self.chunks.get(wanted.name, ()))
        except extent.MissingPartError as error:
            raise InfrastructureError(f"Of the tensor {wanted.name} {error}.") from error
        for chunk, box in pieces:
            saved = self._ranks[chunk.rank].tensors[chunk.index]
            stored = layouts.extent_of(saved.shape, saved.part)
            at = tuple(map(sum, zip(stored.at, box.in_source, strict=True)))
            part = Extent(stored.whole, at, box.shape)
            cut = [slice(a, a + n) for a, n in zip(box.in_target, box.shape, strict=True)]
            yield Target(saved.path, saved.dtype, part, wanted.tensor[tuple(cut)])


def _place(tensor: layouts.Tensor, whole: Sequence[int]) -> Extent:
    """Return the position of a saved tensor in the whole one."""
    if len(tensor.path) == 2:  # saved `by_tensors`
        return layouts.extent_of(tensor.shape, tensor.part)
    at = tuple(int(number) for number in str(tensor.path[2]).split(".") if number)
    return Extent(tuple(whole), at, tensor.shape)


class Reading:
    """A load in two passes: first the description of what was saved, then parts of it."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self.record: LoadRecord | None = None
        """The loaded step and its source; None before they are known."""

    def look(self) -> Saved | None:
        """Return what was saved of the newest step; None if nothing was ever saved. Collective.

        Raises:
            ConfigurationError: the step was not saved by name.
            InfrastructureError: checkpoints existed, and none can be loaded.
        """
        found: list[Saved] = []

        def choose(ranks: Mapping[int, RankState]) -> list[Target]:
            found.append(Saved(ranks))
            return []

        self.record = self._checkpointer.load_parts(choose)
        return found[-1] if self.record is not None else None

    def take(self, choose: Callable[[Saved], Iterable[Wanted]]) -> None:
        """Load the parts that ``choose`` returns, of the step that `look` found. Collective.

        Raises:
            InfrastructureError: the step is damaged or gone. The next try takes an older one.
        """

        def targets(ranks: Mapping[int, RankState]) -> Sequence[Target]:
            saved = Saved(ranks)
            return [target for wanted in choose(saved) for target in saved.targets(wanted)]

        before, self.record = self.record, self._checkpointer.load_parts(targets)
        if self.record is None or before is None or self.record.step != before.step:
            self._checkpointer.set_damaged_aside()
            raise InfrastructureError(
                "The step that was to be loaded is damaged or gone; load again to take an older one."
            )
