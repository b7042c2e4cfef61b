"""Tensors that may be spread over ranks, as FSDP2 and tensor parallelism leave them (``DTensor``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory; a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def spread_by_rows(tensor: torch.Tensor) -> bool:
    """Return whether each row of the first dimension is on one rank, or on several as a whole."""
    return all(
        placement.is_replicate() or (type(placement).__name__ == "Shard" and placement.dim == 0)
        for placement in getattr(tensor, "placements", ())
    )


def like(
    parameter: torch.Tensor, part: torch.Tensor, shape: torch.Size | None = None
) -> torch.Tensor:
    """Return this rank's part of a tensor as a tensor that is spread like the parameter.

    Args:
        parameter: a parameter, which may be plain; then so is the result.
        part: this rank's part.
        shape: shape of the whole tensor if it is not the parameter's; it is stored row by row.
    """
    if not hasattr(parameter, "to_local"):
        return part
    stride = parameter.stride() if shape is None else torch.empty(shape, device="meta").stride()
    return type(parameter).from_local(
        part.to(parameter.to_local().device), parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape if shape is None else shape, stride=stride,
    )  # fmt: skip


def parameters(groups: Iterable[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the parameters of an optimizer's groups, in the order of their numbers in its state dict."""
    return [parameter for group in groups for parameter in group["params"]]


def saved_states(
    groups: Iterable[dict[str, Any]], saved: dict[str, Any]
) -> Iterable[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield each parameter with its entries in a state dict, which counts parameters in the same order."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters(groups), strict=True):
        yield parameter, saved["state"].get(number, {})
