"""Gradients of rows that wait until a backward pass, or a step, is over: a key has one update, however often it occurs."""

from __future__ import annotations

import weakref
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrover._util import forks


class EmbeddingTable(Protocol):
    """A table in this process or on servers. Equal tables have the same rows."""

    dim: int

    def lookup(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows of keys, ``(n, dim)``; insert what is new."""

    def peek(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows of keys, ``(n, dim)``, without inserting."""

    def update(self, keys: NDArray[np.int64], gradients: NDArray[np.float32]) -> None:
        """Apply gradients ``(n, dim)``; equal keys count once, with the sum of theirs."""


class HeldGradients:
    """Gradients of any number of tables, until they are applied. Several threads may add some."""

    def __init__(self) -> None:
        self._lock = forks.Lock()
        self._of: dict[EmbeddingTable, list[tuple[Tensor, Tensor]]] = {}

    def add(self, table: EmbeddingTable, keys: Tensor, gradient: Tensor, scale: float) -> None:
        """Add a gradient ``(n, dim)`` of keys ``(n,)``, times ``scale``."""
        scaled = gradient.detach().to("cpu", torch.float32) * scale  # autograd may change its own
        with self._lock:
            self._of.setdefault(table, []).append((keys.cpu(), scaled))

    def apply(self) -> None:
        """Update each table once with the sum of what was added, which is dropped."""
        with self._lock:
            held, self._of = self._of, {}
        for table, parts in held.items():
            keys, gradients = (torch.cat([part[place] for part in parts]) for place in (0, 1))
            table.update(keys.numpy(), gradients.numpy())


_passes: weakref.WeakValueDictionary[int, HeldGradients] = weakref.WeakValueDictionary()
_lock = forks.Lock()


def of_this_pass() -> HeldGradients:
    """Return what the backward pass that calls this applies at its end; one that fails applies nothing."""
    number = torch._C._current_graph_task_id()  # noqa: SLF001 - as FSDP does, for want of a public name
    with _lock:
        held = _passes.get(number)
        if held is None:
            held = _passes[number] = HeldGradients()
            torch.autograd.Variable._execution_engine.queue_callback(held.apply)  # noqa: SLF001
        return held
