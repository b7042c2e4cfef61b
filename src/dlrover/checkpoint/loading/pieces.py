"""Assembly of tensors from pieces of saved ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dlrover.checkpoint.engine.tree import DTYPES
from dlrover.checkpoint.loading.plan import Plan
from dlrover.checkpoint.machine.extent import Piece


def cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the elements of a piece from the tensor that holds it."""
    if piece.box.shape == tuple(tensor.shape):
        return tensor
    return tensor[_slices(piece.box.in_source, piece.box.shape)]


def _slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def assemble(
    planned: Plan,
    pieces: Sequence[Sequence[Piece]],
    read: Callable[[Piece], torch.Tensor],
) -> list[torch.Tensor]:
    """Return the wanted part of each tensor; where one piece covers it, return that piece without a copy."""
    tensors = []
    for tensor, wanted, needed in zip(
        planned.tensors, planned.restoration.wanted, pieces, strict=True
    ):
        shape = wanted.shape if wanted is not None else (0,)
        if len(needed) == 1 and needed[0].box.shape == shape:
            tensors.append(read(needed[0]))
            continue
        whole = torch.empty(shape, dtype=DTYPES[tensor.dtype])
        for piece in needed:
            whole[_slices(piece.box.in_target, piece.box.shape)] = read(piece)
        tensors.append(whole)
    return tensors
