"""Copies that run beside the training, and what keeps them from being torn.

A parameter and its optimizer's state change only when the optimizer steps: a hook makes that wait for the
copy. All other tensors are copied before `save` returns. Should one change all the same, torch's count of
in-place changes tells, and the copy is not used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlrover.checkpoint import tree
from dlrover.checkpoint.copying import Copier
from dlrover.checkpoint.layout import name
from dlrover.checkpoint.tree import Spread, State
from dlrover.errors import InfrastructureError

_version = operator.attrgetter("_version")


class Background:
    """Runs one copy at a time in a thread; optimizers wait for it before they step."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def start(self, copy: Callable[[], None]) -> None:
        """Begin a copy; the last one has been waited for."""
        self._running = self._pool.submit(copy)

    def wait(self) -> None:
        """Wait for the copy, if there is one.

        Raises:
            InfrastructureError: it failed.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _before_step(self, *_: Any) -> None:
        if self._running is not None:
            self._running.exception()  # waits; `wait` raises what it was

    def close(self) -> None:
        """Let optimizers go on without this."""
        self._hook.remove()
        self._pool.shutdown()


class Snapshot:
    """What of a state must be known before `save` returns, so that the copy can be made later."""

    def __init__(self, copier: Copier, unguarded: list[int]) -> None:
        self._copier = copier
        sources = copier.sources
        with torch.no_grad():
            self._copies = [(index, sources[index].clone()) for index in unguarded]
        taken = set(unguarded)
        self._guarded = [index for index in range(len(sources)) if index not in taken]
        self._versions = self._current()

    def _current(self) -> list[int]:
        sources = self._copier.sources
        return [_version(sources[index]) for index in self._guarded]

    def copy(self, buffer: torch.Tensor) -> list[int]:
        """Copy to a generation; the tensors that changed meanwhile: then it must not be used."""
        self._copier.copy(buffer)
        for index, tensor in self._copies:
            self._copier.put(buffer, index, tensor)
        now = self._current()
        return [
            index
            for index, before, after in zip(self._guarded, self._versions, now, strict=True)
            if before != after
        ]


class Guarded:
    """Tells which tensors of a state only its optimizers change."""

    def __init__(self) -> None:
        self._key: object = None
        self._unguarded: list[int] = []
        self._changed: set[int] = set()

    def unguarded(self, state: State, copier: Copier) -> list[int]:
        """The others, by their number in the layout."""
        key = [source.data_ptr() for source in copier.sources]
        if key != self._key:
            safe = {tensor.data_ptr() for tensor in _guarded(state)}
            self._unguarded = [
                index
                for index, source in enumerate(copier.sources)
                if source.data_ptr() not in safe or source.is_inference() or index in self._changed
            ]
            self._key = key
        return self._unguarded

    def distrust(self, changed: list[int]) -> None:
        """Do not rely on these any more."""
        self._changed.update(changed)
        self._key = None


def torn(step: int, copier: Copier, changed: list[int]) -> InfrastructureError:
    """The error of a copy that must not be used."""
    return InfrastructureError(
        f"Step {step} was not kept: {name(copier.path(changed[0]))} was changed in place while it was"
        " copied, and not by an optimizer's step. From now on it is copied before save returns."
    )


def _guarded(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        yield from map(_local, value.parameters())
    elif isinstance(value, torch.optim.Optimizer):
        for mine in value.state.values():
            yield from (_local(item) for item in mine.values() if isinstance(item, torch.Tensor))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _guarded(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _guarded(item)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tree.local_part(tensor) if isinstance(tensor, Spread) else tensor
