"""Mixed precision: matrix products in bf16 or fp16, parameters and the optimizer in fp32."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(model: nn.Module, precision: str, device: torch.device) -> None:
    """Run a model's forward pass under autocast, in every call of the same module.

    Outputs are in fp32, so that a loss computed outside is, too.
    """
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=DTYPES[precision]):
            output = inner(*args, **kwargs)
        return _float(output)

    model.forward = forward


def _float(output: Any) -> Any:
    def one(item: Any) -> Any:
        half = isinstance(item, torch.Tensor) and item.dtype in DTYPES.values()
        return item.float() if half else item

    return torch.utils._pytree.tree_map(one, output)  # noqa: SLF001 - as torch's own wrappers do


class WorldScaler(torch.amp.GradScaler):  # type: ignore[misc]
    """A ``GradScaler`` whose ranks decide together whether a step is skipped.

    Ranks hold different parts of the gradients, so that one alone may see an overflow.
    """

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._unscale_grads_(*args, **kwargs)
        if dist.is_initialized():
            for overflow in found.values():
                dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        return found


def scaler_of(device: torch.device) -> WorldScaler:
    """Return a scaler that is ready before the first loss."""
    scaler = WorldScaler(device.type)
    scaler.scale(torch.zeros((), device=device))
    return scaler
