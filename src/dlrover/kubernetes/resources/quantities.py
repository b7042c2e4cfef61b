"""A container's resources: quantities as numbers, and growth of its requests and limits."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

_UNITS: dict[str, int | Decimal] = {
    "": 1, "m": Decimal("0.001"),
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip


def quantity(text: str | int) -> Decimal:
    """Return a Kubernetes quantity as a number: ``1Gi``, ``500m``, ``1e3``."""
    found = re.fullmatch(
        r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(\w*)", str(text).strip(), re.ASCII
    )
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a quantity")
    return Decimal(found[1]) * _UNITS[found[2]]


def grow(container: dict[str, Any], memory: float, cpu: float = 1.0) -> None:
    """Multiply a container's memory and CPU requests and limits, where set."""
    resources = container.get("resources") or {}
    for kind in ("requests", "limits"):
        asked = resources.get(kind) or {}
        if memory != 1.0 and asked.get("memory") is not None:
            wanted = quantity(asked["memory"]) * Decimal(str(memory))
            asked["memory"] = f"{_up(wanted / 2**20)}Mi"
        if cpu != 1.0 and asked.get("cpu") is not None:
            asked["cpu"] = f"{_up(quantity(asked['cpu']) * Decimal(str(cpu)) * 1000)}m"


def _up(amount: Decimal) -> int:
    """Round up to a whole number, ignoring the rounding error of a multiplication."""
    return math.ceil(round(amount, 6))
