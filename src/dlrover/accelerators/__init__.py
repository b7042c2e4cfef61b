"""Vendor adapters: all code specific to one accelerator vendor is in this folder."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from pathlib import Path

from dlrover.accelerators import ascend, cpu, metax, mthreads, nvidia
from dlrover.accelerators.base import DeviceHealth, DeviceUse, Vendor

__all__ = [
    "CPU",
    "RESOURCES",
    "VENDORS",
    "DeviceHealth",
    "DeviceUse",
    "Vendor",
    "pci_addresses",
    "present",
    "resources",
    "vendors",
]

logger = logging.getLogger(__name__)

PCI_DRIVERS = Path("/sys/bus/pci/drivers")
ENTRY_POINTS = "dlrover.accelerators"
"""Group of entry points by which other packages register their `Vendor`."""

VENDORS = (nvidia.VENDOR, ascend.VENDOR, mthreads.VENDOR, metax.VENDOR)
"""Vendors that DLRover brings along."""
CPU = cpu.VENDOR
"""The CPU as a vendor: what a machine without accelerators trains on."""

RESOURCES = (*(vendor.resource for vendor in VENDORS), CPU.resource)
"""Values of ``--accelerator`` without further packages, the default first."""


@functools.cache
def vendors() -> tuple[Vendor, ...]:
    """Return all known accelerator vendors, those of other packages last; without the CPU."""
    found = list(VENDORS)
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            vendor = entry.load()
        except Exception:  # a fault in another package's code must not end a job
            logger.warning("The accelerator %s cannot be loaded", entry.value, exc_info=True)
            continue
        if isinstance(vendor, Vendor):
            found.append(vendor)
        else:
            logger.warning("The accelerator %s is no dlrover Vendor", entry.value)
    return tuple(found)


def resources() -> tuple[str, ...]:
    """Return the values of ``--accelerator``, the default first."""
    return (*(vendor.resource for vendor in vendors()), CPU.resource)


def present(resource: str = "", dev: Path = Path("/dev")) -> Vendor:
    """Return the vendor of ``resource`` if its devices are present, else a present vendor, else the CPU."""
    if resource == CPU.resource:
        return CPU
    found = [vendor for vendor in vendors() if vendor.device_files(dev)]
    wanted = [vendor for vendor in found if vendor.resource == resource]
    return (wanted or found or [CPU])[0]


def pci_addresses(drivers: Path = PCI_DRIVERS) -> tuple[str, ...]:
    """Return the PCI addresses of this machine's accelerators, in the numbering order of frameworks."""
    found = [
        device.name
        for vendor in vendors()
        if vendor.pci_driver
        for device in (drivers / vendor.pci_driver).glob("[0-9a-f]*:*")
    ]
    return tuple(sorted(found))
