"""Huawei Ascend."""

from __future__ import annotations

import re

from dlrover._util.accelerators.base import DeviceHealth, Vendor

# | 0     910B3               | OK            | 97.6        54                0    / 0             |
_DEVICE = re.compile(r"\|\s*(\d+)\s+(\S+)\s*\|\s*([A-Za-z]+)\s*\|.*/")


def parse_health(text: str) -> tuple[DeviceHealth, ...]:
    """The devices in the table of ``npu-smi info``."""
    return tuple(
        DeviceHealth(int(match[1]), match[2], _problem(match[3]))
        for match in map(_DEVICE.match, text.splitlines())
        if match and match[3] != "NA"
    )


def _problem(health: str) -> str:
    # Warning is about temperature or voltage; training goes on with it.
    return "" if health in ("OK", "Warning") else f"npu-smi says {health}"


VENDOR = Vendor(
    "ascend",
    "ascend-npu",
    re.compile(r"davinci\d+"),
    torch_device="npu",
    torch_module="torch_npu",
    backend="hccl",
    health_command=("npu-smi", "info"),
    parse_health=parse_health,
)
