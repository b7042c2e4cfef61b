"""Copies that run beside the training, and what keeps them from being torn.

A parameter and its optimizer's state change only when the optimizer steps: a hook makes that wait for the
copy. All other tensors are copied before `save` returns. A write that no hook sees voids the copy, however it
is made. torch counts changes in place, except those through ``.data``, a graph of an accelerator or a kernel
of somebody else's. So the state is read again after the copy and compared byte for byte, and a sample of it
is compared with what it was when `save` was called.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlrover.checkpoint import tree
from dlrover.checkpoint.copying import Copier
from dlrover.checkpoint.layout import name
from dlrover.checkpoint.tree import Spread, State
from dlrover.errors import InfrastructureError

SAMPLED_TENSORS = 1024
"""Of more tensors than this, some are sampled: an optimizer's step changes all of them."""
SAMPLES = 16
"""Elements of a tensor, at equal distances. Each is a miss of the cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Types to look at the bits of elements with, by the elements' size."""

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

    def finish(self) -> None:
        """Wait for the copy, if there is one; `wait` raises what went wrong."""
        if self._running is not None:
            self._running.exception()

    def _before_step(self, *_: Any) -> None:
        self.finish()

    def close(self) -> None:
        """Let optimizers go on without this."""
        self._hook.remove()
        self._pool.shutdown()


class Guarded:
    """Tells which tensors of a state only its optimizers change."""

    def __init__(self) -> None:
        self._key: object = None
        self._changed: set[int] = set()
        self.unguarded: list[int] = []
        """The others, by their number in the layout."""
        self.guarded: list[int] = []
        self.sample = Sample([])

    def look_at(self, state: State, copier: Copier) -> None:
        """Find them; at once if the state's tensors lie where they lay."""
        sources = copier.sources
        key = [source.data_ptr() for source in sources]
        if key == self._key:
            return
        safe = {tensor.data_ptr() for tensor in _guarded(state)}
        self.unguarded, self.guarded = [], []
        for index, source in enumerate(sources):
            trusted = source.data_ptr() in safe and index not in self._changed
            known = self.guarded if trusted and _can_be_sampled(source) else self.unguarded
            known.append(index)
        self.sample = Sample([sources[index] for index in self.guarded])
        self._key = key

    def distrust(self, changed: list[int]) -> None:
        """Do not rely on these any more."""
        self._changed.update(changed)
        self._key = None


class Sample:
    """Some elements of tensors, seen as integers: writes to a whole tensor change them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        every = -(-len(tensors) // SAMPLED_TENSORS) or 1
        views = [_elements(tensor) for tensor in tensors[::every] if tensor.numel()]
        kinds = operator.attrgetter("device.type", "device.index", "dtype")
        views.sort(key=lambda view: str(kinds(view)))
        self._kinds = [list(alike) for _, alike in groupby(views, key=kinds)]

    def take(self) -> list[torch.Tensor]:
        """What the elements are now."""
        with torch.no_grad():
            return [torch.cat(views) for views in self._kinds]

    def equals(self, before: list[torch.Tensor]) -> bool:
        """Whether they are what they were."""
        return all(map(torch.equal, self.take(), before))


def _can_be_sampled(tensor: torch.Tensor) -> bool:
    """Whether the elements lie one behind the other, in whatever order, and are what they seem."""
    places = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    dense = not tensor.numel() or places == tensor.numel()
    return dense and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(_INTEGERS[tensor.itemsize])
    return flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]


class Snapshot:
    """What of a state must be known before `save` returns, so that the copy can be made later."""

    def __init__(self, copier: Copier, guarded: Guarded) -> None:
        self._copier = copier
        sources = copier.sources
        with torch.no_grad():
            self._copies = [(index, sources[index].clone()) for index in guarded.unguarded]
        self._guarded = guarded.guarded
        self._versions = self._current()
        self._sample = guarded.sample
        self._sampled = self._sample.take()

    def _current(self) -> list[int]:
        sources = self._copier.sources
        return [_version(sources[index]) for index in self._guarded]

    def copy(self, buffer: torch.Tensor) -> list[int]:
        """Copy to a generation; the tensors that changed meanwhile: then it must not be used."""
        self._copier.copy(buffer)
        for index, tensor in self._copies:
            self._copier.put(buffer, index, tensor)
        counted = [
            index
            for index, before, after in zip(
                self._guarded, self._versions, self._current(), strict=True
            )
            if before != after
        ]
        changed = counted or self._copier.differing(buffer, self._guarded)
        with self._copier.beside():
            same = self._sample.equals(self._sampled)
        return changed if changed or same else self._guarded


def torn(step: int, copier: Copier, changed: list[int]) -> InfrastructureError:
    """The error of a copy that must not be used."""
    others = f" and {len(changed) - 1} other tensors were" if len(changed) > 1 else " was"
    return InfrastructureError(
        f"Step {step} was not kept: {name(copier.path(changed[0]))}{others} changed in place while it was"
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
