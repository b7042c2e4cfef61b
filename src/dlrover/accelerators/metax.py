"""The adapter for MetaX, whose PyTorch shows devices and communication library under CUDA's names."""

from __future__ import annotations

import re

from dlrover.accelerators.base import DeviceHealth, Vendor

# GPU#0    MXC500      0000:08:00.0   Available (UUID: GPU-e702f06b-bbd6-bc06-5196-90a5554a24ba)
_DEVICE = re.compile(r"GPU#(\d+)\s+(\S.*?)\s+[0-9a-fA-F]{4}:[0-9a-fA-F:.]+\s+(.*)")


def parse_health(text: str) -> tuple[DeviceHealth, ...]:
    """Return the devices in the list of ``mx-smi -L``."""
    return tuple(
        DeviceHealth(int(match[1]), match[2], _problem(match[3]))
        for match in map(_DEVICE.match, text.splitlines())
        if match
    )


def _problem(state: str) -> str:
    state = state.partition("(UUID")[0].strip()
    return "" if state == "Available" else f"mx-smi says {state}"


VENDOR = Vendor(
    "metax",
    "metax-tech.com/gpu",
    # One control device for all boards.
    re.compile(r"mxcd"),
    health_command=("mx-smi", "-L"),
    parse_health=parse_health,
)
