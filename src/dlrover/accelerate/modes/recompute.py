"""Activation checkpointing: a block keeps less of its forward pass, and its backward pass computes it again."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_ATEN = torch.ops.aten
KEPT = {
    operation
    for name in (
        "mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable",
    )
    if (packet := getattr(_ATEN, name, None)) is not None
    for operation in (packet.default,)
}  # fmt: skip
"""Operations whose results are kept by selective recomputation: products of matrices, and fused attention."""


def recompute(block: nn.Module, how: str) -> None:
    """Make a block's backward pass compute its activations again: ``full``, or all but ``KEPT``.

    The block stays the same module with the same names; only its ``forward`` is wrapped.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    inner = block.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, **options, **kwargs)

    block.forward = forward


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
