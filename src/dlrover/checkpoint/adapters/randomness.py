"""The state of all random numbers of a process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def states(*, every_device: bool) -> dict[str, Any]:
    """Of Python, NumPy, PyTorch and the accelerators: all that this process sees, or its current one."""
    cpu = torch.random.get_rng_state()
    found = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": cpu}
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        device = torch.get_device_module(kind).random
        found[kind] = device.get_rng_state_all() if every_device else device.get_rng_state()
    return found


def restore(saved: dict[str, Any]) -> None:
    """Set what `states` gave with ``every_device``; accelerators that are not there now are left out."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.random.set_rng_state(saved["cpu"])
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        device = torch.get_device_module(kind).random
        if len(saved.get(kind, ())) == torch.accelerator.device_count():
            device.set_rng_state_all(saved[kind])
