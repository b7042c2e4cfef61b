"""What an optimizer trains and keeps: read off it after its first step, without torch."""

from __future__ import annotations

from typing import Any


def read(optimizer: Any) -> tuple[int, int, int]:
    """The numbers that an optimizer trains, their bytes, and the bytes of its state. Of this rank's part."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    count = sum(_local(p).numel() for p in parameters)
    size = sum(_bytes(p) for p in parameters)
    kept = sum(
        _bytes(value)
        for state in list(optimizer.state.values())
        for value in (state.values() if isinstance(state, dict) else ())
    )
    return count, size, kept


def _local(tensor: Any) -> Any:
    """This rank's part of a tensor that is divided among ranks."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor  # noqa: SLF001


def _bytes(value: Any) -> int:
    """Of a tensor; 0 for anything else."""
    local = _local(value)
    if not (hasattr(local, "numel") and hasattr(local, "element_size")):
        return 0
    return int(local.numel() * local.element_size())
