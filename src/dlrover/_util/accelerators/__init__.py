"""Vendor adapters: everything that is particular to one maker of accelerators is in this folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PCI_DRIVERS = Path("/sys/bus/pci/drivers")


@dataclass(frozen=True)
class Vendor:
    """One maker of accelerators."""

    name: str
    resource: str
    """How schedulers name its devices, and so ``--accelerator``."""
    device_file: re.Pattern[str]
    """Names in ``/dev`` of its devices."""
    pci_driver: str = ""
    """The kernel driver that its devices are bound to; empty where it is not known."""


VENDORS = (
    Vendor("nvidia", "nvidia.com/gpu", re.compile(r"nvidia\d+"), "nvidia"),
    Vendor("ascend", "ascend-npu", re.compile(r"davinci\d+")),
    Vendor("mthreads", "mthreads.com/gpu", re.compile(r"mtgpu\.\d+")),
    # MetaX has one control device for all of its boards.
    Vendor("metax", "metax-tech.com/gpu", re.compile(r"mxcd")),
)

RESOURCES = (*(vendor.resource for vendor in VENDORS), "cpu")
"""What ``--accelerator`` takes, the default first."""


def pci_addresses(drivers: Path = PCI_DRIVERS) -> tuple[str, ...]:
    """PCI addresses of this machine's accelerators, in the order in which frameworks number them."""
    found = [
        device.name
        for vendor in VENDORS
        if vendor.pci_driver
        for device in (drivers / vendor.pci_driver).glob("[0-9a-f]*:*")
    ]
    return tuple(sorted(found))
