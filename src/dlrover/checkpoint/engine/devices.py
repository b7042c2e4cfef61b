"""Copies from an accelerator: on a separate stream, into memory that the device writes to directly.

This module could not be run where it was written, as no accelerator was available there.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dlrover.checkpoint.saver.memory import Generation

logger = logging.getLogger(__name__)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the accelerator that holds tensors of a state; None if all are in host memory."""
    return next((t.device for t in tensors if t.device.type != "cpu"), None)


class SideStream:
    """A stream beside the one that an accelerator computes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)
        self._ready: torch.Event | None = None

    def mark(self) -> None:
        """Make the copies wait for the work that the device has queued until now."""
        self._ready = torch.Event(device=self._device)
        self._ready.record(torch.accelerator.current_stream(self._device))

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Run the block's copies on this stream; they are complete at its end."""
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            if self._ready is not None:
                self._stream.wait_event(self._ready)
            yield
            self._stream.synchronize()
        finally:
            torch.accelerator.set_stream(before)


def pin(generation: Generation, buffer: torch.Tensor, device: torch.device) -> None:
    """Pin a generation's memory, where the runtime offers that, so that the device writes to it directly."""
    runtime: Any = getattr(getattr(torch, device.type, None), "cudart", None)
    if runtime is None:
        return
    error = int(runtime().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
    if error:
        logger.warning("Memory of %d bytes is not pinned: error %d", buffer.numel(), error)
        return
    weakref.finalize(generation, runtime().cudaHostUnregister, buffer.data_ptr())
