"""The profile of an optimizer: sizes of its parameters and state after its first step, read without torch."""

from __future__ import annotations

from typing import Any


def read(optimizer: Any) -> tuple[int, int, int]:
    """Return the count of trained parameters, their bytes, and the optimizer state's bytes, on this rank."""
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
    """Return this rank's part of a tensor that is divided among ranks; other values unchanged."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor  # noqa: SLF001


def _bytes(value: Any) -> int:
    """Return the bytes of a tensor; 0 for any other value."""
    local = _local(value)
    if not (hasattr(local, "numel") and hasattr(local, "element_size")):
        return 0
    return int(local.numel() * local.element_size())
