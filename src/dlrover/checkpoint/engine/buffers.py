"""Tensors as memory: their views in a generation's bytes, their parts, and what a copy may overwrite."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.extent import Box
from dlrover.checkpoint.machine.layout import TensorEntry, TensorSpec
from dlrover.checkpoint.saver.memory import Generation
from dlrover.errors import ConfigurationError

logger = logging.getLogger(__name__)

Words: TypeAlias = npt.NDArray[np.uint64]
"""Addresses, sizes or hashes."""
Places: TypeAlias = tuple[Words, Words]
"""Offsets and sizes of tensors, in bytes."""
THREADS = 4
"""Maximum number of threads that copy; beyond it, memory bandwidth is the limit."""
_is_cpu = operator.attrgetter("is_cpu")


def threads(share: int) -> int:
    """Return the number of threads for a copy that ``share`` processes of this machine make at once."""
    return max(1, min(THREADS, len(os.sched_getaffinity(0)) // share))


def views(buffer: torch.Tensor, entries: Sequence[TensorEntry]) -> list[torch.Tensor]:
    """Return the tensors in ``buffer`` (one dimension, uint8)."""
    found: list[torch.Tensor] = []
    for run in _neighbours(entries):
        flat = buffer[run[0].offset : run[-1].end].view(tree.DTYPES[run[0].dtype])
        sizes = [math.prod(entry.shape) for entry in run]
        found += [
            part if len(entry.shape) == 1 else part.view(entry.shape)
            for part, entry in zip(flat.split(sizes), run, strict=True)
        ]
    return found


def _neighbours(entries: Sequence[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Yield runs of adjacent entries of one type."""
    run: list[TensorEntry] = []
    for entry in entries:
        if run and (run[-1].end != entry.offset or run[-1].dtype != entry.dtype):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def view(data: memoryview, tensor: TensorSpec) -> torch.Tensor:
    """Return the tensor whose bytes are ``data``."""
    if not data:
        return torch.empty(tensor.shape, dtype=tree.DTYPES[tensor.dtype], device="cpu")
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return flat.view(tree.DTYPES[tensor.dtype]).view(tensor.shape)


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the elements of the box in its source ``tensor``."""
    return tensor if box.shape == tuple(tensor.shape) else tensor[box.source]


def joined(
    dtype: str, shape: tuple[int, ...], pieces: Sequence[tuple[Box, Callable[[], torch.Tensor]]]
) -> torch.Tensor:
    """Return a tensor made of pieces that are read one by one; a single piece is not copied."""
    if len(pieces) == 1 and pieces[0][0].shape == shape:
        return pieces[0][1]()
    whole = torch.empty(shape, dtype=tree.DTYPES[dtype], device="cpu")
    for box, read in pieces:
        whole[box.target] = read()
    return whole


def check_memory(tensor: torch.Tensor, path: layouts.Path) -> None:
    """Refuse a tensor whose storage was made smaller: what copies it does not look.

    Raises:
        ConfigurationError: memory is missing.
    """
    there, size = tensor.untyped_storage().nbytes(), tensor.itemsize
    known = tensor.is_contiguous() and there >= tensor.storage_offset() * size + tensor.nbytes
    if known or not tensor.numel():
        return
    # Not the number of its bytes, where elements have gaps between them or share their memory.
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + span + 1) * size
    if there < needed:
        raise ConfigurationError(
            f"The tensor {layouts.name(path)} needs {needed} bytes, and its storage has only {there}; save or load"
            " it while it has its memory."
        )


def written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell PyTorch that tensors were written: a backward pass that needs what was there before must fail."""
    torch.autograd.graph.increment_version(list(tensors))


def overwrite(targets: Sequence[torch.Tensor], contents: Sequence[torch.Tensor]) -> None:
    """Copy each of the contents to its target."""
    lazy = [target.is_conj() or target.is_neg() for target in targets]
    with torch.no_grad():
        if not any(lazy):
            torch._foreach_copy_(list(targets), list(contents))
            return
        for target, content in zip(targets, contents, strict=True):
            target.copy_(content)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is exactly its contiguous bytes in this process's memory."""
    return bool(are_plain([tensor])[0])


def are_plain(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.bool_]:
    """Return for each tensor whether it is exactly its contiguous bytes in this process's memory."""
    kind, count = torch.Tensor, len(tensors)
    plain = np.fromiter(map(_is_cpu, tensors), np.bool_, count)
    plain &= np.fromiter(map(kind.is_contiguous, tensors), np.bool_, count)
    for is_lazy in (kind.is_conj, kind.is_neg):
        plain &= ~np.fromiter(map(is_lazy, tensors), np.bool_, count)
    return plain


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the accelerator that holds tensors of a state; None if all are in host memory."""
    return next((tensor.device for tensor in tensors if not tensor.is_cpu), None)


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
