"""The adapter for training on the CPU, without an accelerator."""

from __future__ import annotations

from dlrover.accelerators.base import NO_FILE, Vendor

VENDOR = Vendor("cpu", "cpu", NO_FILE, torch_device="cpu", backend="gloo")
