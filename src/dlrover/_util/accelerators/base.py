"""What is to be known of one maker of accelerators."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NO_FILE = re.compile(r"(?!)")
"""Matches no name: for devices that have no file of their own in ``/dev``."""


@dataclass(frozen=True)
class DeviceHealth:
    """What a vendor's tool says of one device."""

    index: int
    name: str
    problem: str = ""
    """Why the device cannot be trusted; empty if the tool finds nothing wrong."""


@dataclass(frozen=True)
class DeviceUse:
    """How much of one device is used, in percent of a moment's time; -1: the tool does not tell."""

    index: int
    busy: int = -1
    """While a program ran on it. A collective that waits for other ranks counts, too."""
    moving: int = -1
    """While its memory was read or written. A collective that waits hardly does that."""
    uuid: str = ""
    """By which environments name it, too; empty if they do not."""


def percent(text: str) -> int:
    """A part in percent, with the sign or without; -1 for what is none, such as ``[N/A]``."""
    number = text.strip().removesuffix("%").strip()
    return int(number) if number.isdecimal() else -1


def _no_use(_text: str) -> tuple[DeviceUse, ...]:
    return ()


def _no_health(_text: str) -> tuple[DeviceHealth, ...]:
    return ()


@dataclass(frozen=True)
class Vendor:
    """One maker of accelerators. A third party's is an instance of this class.

    It is named as an entry point of the group ``dlrover.accelerators``.
    """

    name: str
    resource: str
    """How schedulers name its devices, and so ``--accelerator``."""
    device_file: re.Pattern[str]
    """Names in ``/dev`` of its devices."""
    pci_driver: str = ""
    """The kernel driver that its devices are bound to; empty where it is not known."""
    torch_device: str = "cuda"
    """PyTorch's type of its devices."""
    torch_module: str = ""
    """What to import so that PyTorch knows them; empty: PyTorch alone does."""
    backend: str = "nccl"
    """PyTorch's name of its collective communication library."""
    health_command: tuple[str, ...] = ()
    """A command that tells how its devices are; empty if there is none."""
    parse_health: Callable[[str], tuple[DeviceHealth, ...]] = _no_health
    """Reads that command's output, one entry for each device; raises nothing."""

    use_command: tuple[str, ...] = ()
    """A command that tells how much of its devices is used; empty if there is none."""
    parse_use: Callable[[str], tuple[DeviceUse, ...]] = _no_use
    """Reads that command's output, one entry for each device; raises nothing."""
    visible: str = "CUDA_VISIBLE_DEVICES"
    """The variable that says which of its devices a process may use, and in which order."""

    def device_files(self, dev: Path = Path("/dev")) -> tuple[str, ...]:
        """Its devices' files on this machine, in order."""
        names = [p.name for p in dev.iterdir()] if dev.is_dir() else []
        found = [name for name in names if self.device_file.fullmatch(name)]
        return tuple(str(dev / name) for name in sorted(found, key=lambda n: (len(n), n)))
