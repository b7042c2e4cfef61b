"""What a layer of a given program keeps for its backward pass, by a trace without memory or device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.records import Transformer

SEQUENCE = 512
"""Tokens of the traced sequence: what a layer keeps grows with them in proportion, with fused attention."""


def traced(
    shape: Transformer, make: Callable[[int], nn.Module], *, sequence: int = SEQUENCE
) -> Transformer:
    """Return ``shape`` with the bytes that a layer of the program keeps, for :func:`predict` and :func:`search`.

    Models of one and of two layers are made and run forward in bf16 on fake tensors, which have shapes and no
    memory; the difference is one layer. A layer of a 405B model takes seconds.

    Args:
        shape: The model's shape.
        make: Makes the model with a given number of layers. It takes a batch of token ids.
        sequence: Tokens of the traced sequence.

    Raises:
        ConfigurationError: two layers keep no more than one.
    """
    one, two = (_kept(make, layers, sequence) for layers in (1, 2))
    if two <= one:
        raise ConfigurationError(
            f"traced: models of 1 and 2 layers keep {one} and {two} bytes: make must add a layer."
        )
    return replace(shape, kept=(two - one) / sequence)


def _kept(make: Callable[[int], nn.Module], layers: int, sequence: int) -> int:
    """Bytes that the forward pass of a model keeps, without its parameters."""
    sizes: dict[int, int] = {}
    tensors: list[torch.Tensor] = []  # alive, so that no storage has the address of an earlier one

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()  # noqa: SLF001 - fake tensors have no address
        tensors.append(tensor)
        return tensor

    with FakeTensorMode():
        model = _in_bf16(make, layers)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = model(torch.zeros(1, sequence, dtype=torch.long))
    parameters = {each.untyped_storage()._cdata for each in model.parameters()}  # noqa: SLF001
    del outputs
    return sum(size for address, size in sizes.items() if address not in parameters)


def _in_bf16(make: Callable[[int], nn.Module], layers: int) -> nn.Module:
    """A model in bf16: fake parameters cannot change their type later."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make(layers)
    finally:
        torch.set_default_dtype(before)
