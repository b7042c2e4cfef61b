"""The adapter for NVIDIA."""

from __future__ import annotations

import re

from dlrover.accelerators.base import DeviceHealth, DeviceUse, Vendor, percent

_FIELDS = (
    "index",
    "name",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
)

_USE = ("index", "uuid", "utilization.gpu", "utilization.memory")


def parse_health(text: str) -> tuple[DeviceHealth, ...]:
    """Return the devices in the output of ``nvidia-smi --query-gpu``, as CSV without header and units."""
    devices = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(_FIELDS) and values[0].isdigit():
            devices.append(DeviceHealth(int(values[0]), values[1], _problem(values)))
        elif match := re.match(
            r"Unable to determine the device handle for (?:GPU|gpu)\s*(\S+?):", line
        ):
            # Printed for a device that has fallen off the bus, before or instead of the other devices.
            devices.append(DeviceHealth(-1, match[1], line.strip()))
    return tuple(devices)


def _problem(values: list[str]) -> str:
    _, _, errors, pages, rows, failure = values
    if errors.isdigit() and int(errors):
        return f"{errors} uncorrected memory errors since the last reset"
    if failure in ("1", "Yes"):
        return "a row of its memory could not be remapped"
    if "Yes" in (pages, rows) or rows == "1":
        return "parts of its memory are to be remapped at the next reset"
    if "[GPU is lost]" in values or "[Unknown Error]" in values:
        return "the driver has lost it"
    return ""


def parse_use(text: str) -> tuple[DeviceUse, ...]:
    """Return the use of the devices in the output of ``nvidia-smi --query-gpu`` with `_USE`, as CSV."""
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    return tuple(
        DeviceUse(int(row[0]), percent(row[2]), percent(row[3]), uuid=row[1])
        for row in rows
        if len(row) == len(_USE) and row[0].isdecimal()
    )


VENDOR = Vendor(
    "nvidia",
    "nvidia.com/gpu",
    re.compile(r"nvidia\d+"),
    "nvidia",
    health_command=(
        "nvidia-smi",
        f"--query-gpu={','.join(_FIELDS)}",
        "--format=csv,noheader,nounits",
    ),
    parse_health=parse_health,
    use_command=("nvidia-smi", f"--query-gpu={','.join(_USE)}", "--format=csv,noheader,nounits"),
    parse_use=parse_use,
)
