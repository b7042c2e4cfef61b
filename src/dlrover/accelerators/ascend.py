"""The adapter for Huawei Ascend."""

from __future__ import annotations

import itertools
import re

from dlrover.accelerators.base import DeviceHealth, DeviceUse, Vendor, percent

# | 0     910B3               | OK            | 97.6        54                0    / 0             |
_DEVICE = re.compile(r"\|\s*(\d+)\s+(\S+)\s*\|\s*([A-Za-z]+)\s*\|.*/")
# | 0                         | 0000:C1:00.0  | 0           0    / 0          3338 / 65536         |
_CHIP = re.compile(r"\|\s*\d+(?:\s+\d+)?\s*\|\s*\S+\s*\|\s*(\d+)\s+\d+\s*/")


def parse_health(text: str) -> tuple[DeviceHealth, ...]:
    """Return the devices in the table of ``npu-smi info``."""
    return tuple(
        DeviceHealth(int(match[1]), match[2], _problem(match[3]))
        for match in map(_DEVICE.match, text.splitlines())
        if match and match[3] != "NA"
    )


def _problem(health: str) -> str:
    # Warning concerns temperature or voltage; training can continue.
    return "" if health in ("OK", "Warning") else f"npu-smi says {health}"


def parse_use(text: str) -> tuple[DeviceUse, ...]:
    """Return the use of the devices in the table of ``npu-smi info``, from the second line of each."""
    lines = text.splitlines()
    pairs = [(_DEVICE.match(one), _CHIP.match(other)) for one, other in itertools.pairwise(lines)]
    return tuple(
        DeviceUse(int(device[1]), percent(chip[1])) for device, chip in pairs if device and chip
    )


VENDOR = Vendor(
    "ascend",
    "ascend-npu",
    re.compile(r"davinci\d+"),
    torch_device="npu",
    torch_module="torch_npu",
    backend="hccl",
    health_command=("npu-smi", "info"),
    parse_health=parse_health,
    use_command=("npu-smi", "info"),
    parse_use=parse_use,
    visible="ASCEND_RT_VISIBLE_DEVICES",
)
