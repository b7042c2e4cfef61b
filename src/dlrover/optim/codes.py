"""Moments in 8 bits: blocks of at most 256 elements with a scale each, and codes whose fourth power is the element.

Block-wise scales are those of Dettmers et al. 2022 (arXiv:2110.02861). With the fourth power, the distance of
two codes is 2 or 3 % of the block's largest magnitude there, 3 or 6 % of an element at a tenth of it, and codes
reach down to 4e-9 of it. A block lies within one row of the first
dimension, so parameters that are spread over ranks by rows have scales that are spread likewise, on any number of ranks.

A number between two codes becomes one of them at random, with the right expected value: else a second moment that
changes by 0.1 % per step would stay where it is. Of a second moment the root is coded, so that it reaches as far down
as the first moment, and never to 0 unless it is 0: an element without second moment would make a giant step.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from dlrover.optim.tensors import like, local, spread_by_rows

BLOCK = 256
"""Most elements per scale."""
SMALLEST = 4096
"""Parameters with fewer elements keep float32 states, as do vectors: they are small, and precision matters there."""


def fits(parameter: torch.Tensor) -> bool:
    """Return whether the moments of a parameter can be coded: a large matrix, spread by rows or not at all."""
    return spread_by_rows(parameter) and parameter.dim() > 1 and parameter.numel() >= SMALLEST


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
    numbers = codes.flatten(1).to(torch.float32).div_(torch.iinfo(codes.dtype).max)
    size = -(-numbers.shape[1] // scales.shape[1])
    spread = scales.repeat_interleave(size, 1)[:, : numbers.shape[1]]
    squares = numbers * numbers
    if codes.dtype == torch.uint8:
        numbers.copy_(squares)
    else:
        numbers.mul_(numbers.abs())
    return numbers.mul_(squares).mul_(spread).view(codes.shape)


def encode(
    numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, draws: torch.Tensor
) -> None:
    """Write the codes and scales of numbers of this rank. What is not finite makes its block not finite.

    ``draws`` holds random numbers from 0 to below 1, at least one per number and one per scale.
    """
    flat = numbers.flatten(1)
    width, levels = flat.shape[1], torch.iinfo(codes.dtype).max
    size = -(-width // scales.shape[1])
    blocks = functional.pad(flat, (0, scales.shape[1] * size - width)).unflatten(1, (-1, size))
    unit = blocks.abs()
    torch.amax(unit, -1, out=scales)
    unit /= scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    lower = unit.sqrt().sqrt_().mul_(levels).floor_().clamp_max_(levels - 1)
    below = (lower / levels).square_().square_()
    above = ((lower + 1) / levels).square_().square_()
    draw = draws[: unit.numel()].view(unit.shape)
    lower += unit.sub_(below) > above.sub_(below).mul_(draw)
    if codes.dtype == torch.uint8:
        torch.maximum(lower, blocks.gt(0), out=lower)
    else:
        lower.copysign_(blocks)
    codes.copy_(lower.flatten(1)[:, :width].view(codes.shape))
