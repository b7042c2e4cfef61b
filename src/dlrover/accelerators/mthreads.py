"""The adapter for Moore Threads."""

from __future__ import annotations

import re

from dlrover.accelerators.base import DeviceHealth, DeviceUse, Vendor, percent

# 0    MTT S4000            |00000000:18:00.0    |0%    0MiB(49152MiB)
_DEVICE = re.compile(r"(\d+)\s+(\S.*?)\s*\|\s*([0-9a-fA-F:.]+)\s*\|\s*(.*)")


def parse_health(text: str) -> tuple[DeviceHealth, ...]:
    """Return the devices in the table of ``mthreads-gmi``."""
    return tuple(
        DeviceHealth(int(match[1]), match[2], _problem(match[4]))
        for match in map(_DEVICE.match, text.splitlines())
        if match
    )


def _problem(usage: str) -> str:
    return "" if "MiB" in usage else f"mthreads-gmi cannot read its memory ({usage.strip()})"


def parse_use(text: str) -> tuple[DeviceUse, ...]:
    """Return the use of the devices in the table of ``mthreads-gmi``."""
    return tuple(
        DeviceUse(int(match[1]), percent(match[4].split()[0]))
        for match in map(_DEVICE.match, text.splitlines())
        if match and match[4].strip()
    )


VENDOR = Vendor(
    "mthreads",
    "mthreads.com/gpu",
    re.compile(r"mtgpu\.\d+"),
    torch_device="musa",
    torch_module="torch_musa",
    backend="mccl",
    health_command=("mthreads-gmi",),
    parse_health=parse_health,
    use_command=("mthreads-gmi",),
    parse_use=parse_use,
    visible="MUSA_VISIBLE_DEVICES",
)
