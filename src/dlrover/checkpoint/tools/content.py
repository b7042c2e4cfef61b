"""A state whose tensors are read one by one: the intermediate form of all conversions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlrover.checkpoint.engine import tree as trees
from dlrover.checkpoint.engine.tree import Flat
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import ITEM_BYTES
from dlrover.errors import ConfigurationError


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read on demand."""

    dtype: str
    shape: tuple[int, ...]
    same: object
    """A key that is equal for tied tensors, which share their bytes."""
    read: Callable[[], torch.Tensor]
    """Returns the content, dense. It may be a view of a file: do not write to it."""

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def data(self) -> memoryview:
        """Return the bytes, in row-major order."""
        if not self.nbytes:
            return memoryview(b"")
        return memoryview(self.read().reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True)
class Content:
    """A state, whatever its format."""

    skeleton: bytes
    paths: Sequence[layouts.Path]
    """The paths of the tensors."""
    tensors: Sequence[LazyTensor]
    step: int | None = None
    """The step's number; None if the source does not say."""
    differing: Sequence[str] = ()
    """Paths whose values differ between ranks: only one rank's value is here."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics that the step was saved with."""

    @property
    def tree(self) -> Any:
        """The state with a `TensorRef` for each tensor."""
        return layouts.decode(self.skeleton)

    @property
    def same_as(self) -> list[int]:
        """For each tensor, the index of the first tensor that it is tied to."""
        first: dict[object, int] = {}
        return [
            first.setdefault((held.dtype, held.shape, held.same), index)
            for index, held in enumerate(self.tensors)
        ]


def content_of(tree: Any, step: int | None = None, differing: Sequence[str] = ()) -> Content:
    """Return the content of a state whose tensors are live ones or `LazyTensor`.

    Raises:
        ConfigurationError: something in it cannot be kept.
    """
    if not isinstance(tree, dict):
        raise ConfigurationError(f"The source holds a {type(tree).__name__}; it must be a dict.")
    found: list[Any] = []
    paths: list[layouts.Path] = []

    def leaf(value: Any, path: layouts.Path) -> Any:
        if not isinstance(value, LazyTensor | torch.Tensor):
            return value
        found.append(value)
        paths.append(path)
        return layouts.pack_ref(len(found) - 1)

    packed = layouts.pack(tree, (), leaf)
    live = [index for index, value in enumerate(found) if isinstance(value, torch.Tensor)]
    flat = Flat([found[i] for i in live], [paths[i] for i in live], {}, None, bare=True)
    same = trees.same_tensors(flat.tensors)
    for index, spec, first in zip(live, trees.specs(flat), same, strict=True):
        read_it = functools.partial(_dense, found[index])
        found[index] = LazyTensor(spec.dtype, spec.shape, ("live", first), read_it)
    return Content(layouts.encode(packed), paths, found, step, differing)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
