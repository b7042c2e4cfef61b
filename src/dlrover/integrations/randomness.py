"""The states of all random number generators of a process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def states(*, every_device: bool) -> dict[str, Any]:
    """Return the states of Python, NumPy, PyTorch and accelerators: all visible ones, or the current one."""
    cpu = torch.random.get_rng_state()
    found = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": cpu}
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        device = torch.get_device_module(kind).random
        found[kind] = device.get_rng_state_all() if every_device else device.get_rng_state()
    return found


def restore(saved: dict[str, Any]) -> None:
    """Restore the result of `states` with ``every_device``; skip accelerators if their number changed."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.random.set_rng_state(saved["cpu"])
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        device = torch.get_device_module(kind).random
        if len(saved.get(kind, ())) == torch.accelerator.device_count():
            device.set_rng_state_all(saved[kind])
