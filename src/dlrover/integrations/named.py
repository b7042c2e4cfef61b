"""A state as other libraries describe it: parts of tensors, and objects, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dlrover.checkpoint.engine.checkpointer import Checkpointer, LoadRecord
from dlrover.checkpoint.engine.tree import DTYPES, Shard, State
from dlrover.checkpoint.loading.plan import RankState, Target
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.extent import Extent, cover
from dlrover.checkpoint.machine.layout import TensorPart, TensorSpec
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


class Saved:
    """One step as all ranks saved it; raises `ConfigurationError` if it was not saved by name."""

    def __init__(self, ranks: Mapping[int, RankState]) -> None:
        self.objects: dict[str, Any] = {}
        """The objects of all ranks, by name."""
        self.parts: dict[str, list[tuple[Extent, TensorSpec]]] = {}
        """The saved parts of each tensor, with their positions in it, by name."""
        for state in ranks.values():
            tree = layouts.decode(state.skeleton)
            if not isinstance(tree, dict) or tree.keys() != {_TENSORS, _WHOLES, _OBJECTS}:
                raise ConfigurationError("The checkpoint was saved in another way than by names.")
            self.objects.update(tree[_OBJECTS])
            for tensor in state.tensors:
                name = str(tensor.path[1])
                box = _place(tensor, tree[_WHOLES].get(name, ()))
                self.parts.setdefault(name, []).append((box, tensor))

    def dtype(self, name: str) -> torch.dtype:
        """Return the element type of a tensor."""
        return DTYPES[self.parts[name][0][1].dtype]

    def whole(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.parts[name][0][0].whole

    def targets(self, name: str, wanted: Extent, tensor: torch.Tensor) -> Iterator[Target]:
        """Yield the saved parts to copy so that ``tensor`` receives the wanted part of the tensor ``name``.

        Raises:
            InfrastructureError: a part was not saved.
        """
        for saved, box in cover(f"The tensor {name}", wanted, self.parts.get(name, ())):
            at = tuple(map(sum, zip(saved.extent.at, box.in_source, strict=True)))
            part = TensorPart(saved.extent.whole, at, -1)
            yield Target(saved.path, saved.dtype, box.shape, part, tensor[box.target])


def _place(tensor: TensorSpec, whole: Sequence[int]) -> Extent:
    """Return the position of a saved tensor in the whole one."""
    if len(tensor.path) == 2:  # saved `by_tensors`
        return tensor.extent
    at = tuple(int(number) for number in str(tensor.path[2]).split(".") if number)
    return Extent(tuple(whole), at, tensor.shape)


class Reading:
    """A load in two passes: first the description of what was saved, then parts of it.

    Args:
        checkpointer: where it was saved.
        step: a stored step to go back to; by default the newest.
    """

    def __init__(self, checkpointer: Checkpointer, step: int | None = None) -> None:
        self._checkpointer, self._step = checkpointer, step
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

        self.record = self._checkpointer.load_parts(choose, self._step)
        return found[-1] if self.record is not None else None

    def take(self, choose: Callable[[Saved], Iterable[Target]]) -> None:
        """Load the parts that ``choose`` returns, of the step that `look` found. Collective.

        Raises:
            InfrastructureError: the step is damaged or gone. The next try takes an older one.
        """

        def targets(ranks: Mapping[int, RankState]) -> Sequence[Target]:
            return list(choose(Saved(ranks)))

        before, self.record = self.record, self._checkpointer.load_parts(targets, self._step)
        if self.record is None or before is None or self.record.step != before.step:
            self._checkpointer.quarantine_damaged()
            raise InfrastructureError(
                "The step that was to be loaded is damaged or gone; load again to take an older one."
            )
