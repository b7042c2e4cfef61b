"""Moments in 8 bits: blocks of at most 256 elements with a scale each, and codes whose cube is the element.

Block-wise scales are those of Dettmers et al. 2022 (arXiv:2110.02861). With the cube, the distance of two codes is 1 or
2 % of the block's largest magnitude there, and 6e-8 or 5e-7 of it at 0. A block lies within one row of the first
dimension, so parameters that are spread over ranks by rows have scales that are spread likewise, on any number of ranks.

A number between two codes becomes one of them at random, with the right expected value: else a second moment that
changes by 0.1 % per step would stay where it is. Of a second moment the root is coded, so that it reaches as far down
as the first moment, and never to 0 unless it is 0: an element without second moment would make a giant step.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from dlrover.optim.tensors import like, local

BLOCK = 256
"""Most elements per scale."""
SMALLEST = 4096
"""Parameters with fewer elements keep float32 states, as do vectors: they are small, and precision matters there."""


def fits(parameter: torch.Tensor) -> bool:
    """Return whether the moments of a parameter can be coded: a large matrix, spread by rows or not at all."""
    by_rows = all(
        placement.is_replicate() or (type(placement).__name__ == "Shard" and placement.dim == 0)
        for placement in getattr(parameter, "placements", ())
    )
    return by_rows and parameter.dim() > 1 and parameter.numel() >= SMALLEST


def zeros(parameter: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of the parameter's shape, and scales of the shape (rows, blocks), that stand for zeros.

    Args:
        parameter: a parameter that `fits`.
        dtype: int8 for signed numbers, uint8 for others.
    """
    part = local(parameter)
    codes = torch.zeros_like(part, dtype=dtype, memory_format=torch.contiguous_format)
    blocks = math.ceil(math.prod(parameter.shape[1:]) / BLOCK)
    scales = torch.zeros(len(part), blocks, device=part.device)
    whole = torch.Size((len(parameter), blocks))
    return like(parameter, codes), like(parameter, scales, whole)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers that codes of this rank stand for, as float32 of their shape."""
    root = codes.reshape(len(codes), -1 if len(codes) else 0).to(torch.float32)
    root.div_(torch.iinfo(codes.dtype).max)
    size = -(-root.shape[1] // scales.shape[1])
    spread = scales.repeat_interleave(size, 1)[:, : root.shape[1]]
    return (root * root).mul_(root).mul_(spread).view(codes.shape)


def encode(
    numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, chance: torch.Generator
) -> None:
    """Write the codes and scales of numbers of this rank. What is not finite makes its block not finite."""
    flat = numbers.reshape(len(numbers), -1)
    width, levels = flat.shape[1], torch.iinfo(codes.dtype).max
    size = -(-width // scales.shape[1])
    blocks = functional.pad(flat, (0, scales.shape[1] * size - width)).unflatten(1, (-1, size))
    unit = blocks.abs()
    torch.amax(unit, -1, out=scales)
    unit /= scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    lower = unit.pow(1 / 3).mul_(levels).floor_().clamp_max_(levels - 1)
    below, above = (lower / levels).pow_(3), ((lower + 1) / levels).pow_(3)
    draw = torch.rand(unit.shape, device=unit.device, generator=chance)
    lower += unit - below > draw.mul_(above.sub_(below))
    if codes.dtype == torch.uint8:
        torch.maximum(lower, unit.gt(0), out=lower)
    else:
        lower.copysign_(blocks)
    codes.copy_(lower.flatten(1)[:, :width].reshape(codes.shape))
