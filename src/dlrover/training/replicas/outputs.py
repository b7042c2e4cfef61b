"""The outputs of models for a rank that replays its program: it computes one for each kind of input, and returns that again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dlrover.checkpoint.engine.tree import DTensor


class Outputs:
    """The outputs of the first passes of models."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def remembered(
        self,
        module: torch.nn.Module,
        forward: Callable[[], Any],
        args: Any,
        kwargs: Any,
        plain: Sequence[torch.nn.Parameter] = (),
        ended: Callable[[], object] = lambda: None,
    ) -> Any:
        """Return the output of the first pass with such arguments, as new tensors; ``ended`` is called in the backward pass.

        They depend on the arguments and on ``plain`` parameters, which get gradients of zeros. Those of a model in
        `DistributedDataParallel` get none: it would take them for gradients of its next pass.
        """
        given = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        modes = tuple(x for x in given if isinstance(x, bool))
        key = (module, module.training, modes, tuple(tuple(x.shape) for x in tensors))
        if key not in self._kept:
            with torch.no_grad():
                self._kept[key] = forward()
        learns = any(p.requires_grad for p in module.parameters())
        learn = [x for x in (*tensors, *plain) if x.requires_grad and not isinstance(x, DTensor)]
        zero = _Zero.apply(ended, torch.zeros((), requires_grad=learns), *learn)
        return _anew(self._kept[key], zero)


class _Zero(torch.autograd.Function):  # type: ignore[misc]
    """A zero that depends on tensors."""

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], object], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.ended, ctx.tensors = ended, tensors
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        ctx.ended()
        return (None, *map(torch.zeros_like, ctx.tensors))


def _anew(output: Any, zero: torch.Tensor) -> Any:
    """Return an output with new tensors, which depend on ``zero``; it may have dataclasses, as DDP and FSDP know them."""

    def new(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value + zero.to(value) if value.is_floating_point() else value.clone()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            other = copy.copy(value)
            for name in (field.name for field in dataclasses.fields(value)):
                object.__setattr__(other, name, _anew(getattr(value, name), zero))
            return other
        return value

    return pytree.tree_map(new, output)
