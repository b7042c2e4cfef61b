"""The table of accelerators: what the data sheets say, and the default coefficients of the time model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dlrover.errors import ConfigurationError

TERMS = (
    "matmul",
    "attention",
    "memory",
    "tensor",
    "tensor_between",
    "launch",
    "collective",
    "collective_between",
    "stagger",
    "pipeline",
    "data",
    "data_between",
    "scatter_between",
    "optimizer",
    "step",
)
"""Terms of the time model: a step takes the sum of each term's ideal time times its coefficient."""


@dataclass(frozen=True)
class AcceleratorModel:
    """One kind of accelerator, and the network that its nodes usually have."""

    flops: float
    """Dense bf16 operations per second, by the data sheet."""
    memory_gib: float
    """Device memory that a program sees."""
    bandwidth: float
    """Bytes per second of the device memory."""
    intra: float
    """Bytes per second and direction between accelerators of a node."""
    inter: float
    """Bytes per second and direction of an accelerator's share of the network between nodes."""
    host: float
    """Bytes per second between device and host memory."""
    coefficients: tuple[float, ...]
    """One per term of ``TERMS``."""
    spread: float
    """Relative error that 80 % of the predicted step times stay within."""
    fp8: float = 0.0
    """Dense fp8 operations per second, by the data sheet; 0 if it has none."""


_A = (1.3, 3.2, 2.7, 2.0, 2.8, 2.0, 0.08, 0.11, 0.1, 3.5, 0.2, 3.8, 1.0, 2.4, 0.1)
_H = (1.43, 3.0, 2.7, 0.54, 2.0, 2.7, 0.19, 0.44, 0.1, 0.3, 2.0, 2.4, 4.6, 1.6, 1.0)
_B = (2.2, 2.5, 2.5, 1.3, 2.0, 1.5, *_H[6:])

_TABLE = {
    "a100-40": AcceleratorModel(312e12, 39.4, 1.55e12, 300e9, 25e9, 25e9, _A, 0.25),
    "a100-80": AcceleratorModel(312e12, 79.1, 2.04e12, 300e9, 25e9, 25e9, _A, 0.25),
    "h100-80": AcceleratorModel(989e12, 79.1, 3.35e12, 450e9, 50e9, 55e9, _H, 0.35, 1979e12),
    "h100-96": AcceleratorModel(800e12, 95.0, 2.40e12, 450e9, 50e9, 55e9, _H, 0.35, 1600e12),
    "h200": AcceleratorModel(989e12, 139.8, 4.80e12, 450e9, 50e9, 55e9, _H, 0.35, 1979e12),
    "b200": AcceleratorModel(2250e12, 178.3, 8.00e12, 900e9, 50e9, 55e9, _B, 0.25, 4500e12),
    "910b": AcceleratorModel(376e12, 60.9, 1.60e12, 196e9, 25e9, 25e9, _A, 0.40),
}
ACCELERATORS: Mapping[str, AcceleratorModel] = MappingProxyType(_TABLE)
"""Accelerators by name."""


def accelerator(name: str) -> AcceleratorModel:
    """Return an accelerator of the table.

    Raises:
        ConfigurationError: the table has no such name.
    """
    found = ACCELERATORS.get(str(name).lower())
    if found is None:
        raise ConfigurationError(
            f"Cluster: accelerator is {name!r}: accepted are {', '.join(ACCELERATORS)}."
        )
    return found
