"""The description of an accelerator vendor and of its devices' state."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NO_FILE = re.compile(r"(?!)")
"""Matches no name; for devices without a file of their own in ``/dev``."""


@dataclass(frozen=True)
class DeviceHealth:
    """Health of one device, as reported by the vendor's tool."""

    index: int
    name: str
    problem: str = ""
    """Reason not to trust the device; empty if the tool reports no problem."""


@dataclass(frozen=True)
class DeviceUse:
    """Use of one device, in percent of a recent period; -1: not reported by the tool."""

    index: int
    busy: int = -1
    """Percent of the time in which a program ran on it; a collective that waits for other ranks counts."""
    moving: int = -1
    """Percent of the time in which its memory was read or written; low while a collective waits."""
    uuid: str = ""
    """Identifier that environment variables may use for it; empty if there is none."""


def percent(text: str) -> int:
    """Parse a percentage, with or without the sign; return -1 for other text, such as ``[N/A]``."""
    number = text.strip().removesuffix("%").strip()
    return int(number) if number.isdecimal() else -1


def _no_use(_text: str) -> tuple[DeviceUse, ...]:
    return ()


def _no_health(_text: str) -> tuple[DeviceHealth, ...]:
    return ()


@dataclass(frozen=True)
class Vendor:
    """An accelerator vendor.

    Other packages register their instance as an entry point of the group ``dlrover.accelerators``.
    """

    name: str
    resource: str
    """Name of its devices for schedulers and ``--accelerator``."""
    device_file: re.Pattern[str]
    """Pattern of its devices' names in ``/dev``."""
    pci_driver: str = ""
    """Kernel driver of its devices; empty if unknown."""
    torch_device: str = "cuda"
    """PyTorch's device type."""
    torch_module: str = ""
    """Module that adds the devices to PyTorch; empty: PyTorch supports them itself."""
    backend: str = "nccl"
    """PyTorch's name of its collective communication library."""
    health_command: tuple[str, ...] = ()
    """Command that reports the health of its devices; empty if there is none."""
    parse_health: Callable[[str], tuple[DeviceHealth, ...]] = _no_health
    """Parser of that command's output: one entry per device; raises nothing."""

    use_command: tuple[str, ...] = ()
    """Command that reports the use of its devices; empty if there is none."""
    parse_use: Callable[[str], tuple[DeviceUse, ...]] = _no_use
    """Parser of that command's output: one entry per device; raises nothing."""
    visible: str = "CUDA_VISIBLE_DEVICES"
    """Environment variable that lists the devices a process may use, in order."""

    def device_files(self, dev: Path = Path("/dev")) -> tuple[str, ...]:
        """Return its devices' files on this machine, in order."""
        names = [p.name for p in dev.iterdir()] if dev.is_dir() else []
        found = [name for name in names if self.device_file.fullmatch(name)]
        return tuple(str(dev / name) for name in sorted(found, key=lambda n: (len(n), n)))
