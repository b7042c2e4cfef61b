"""Copies that run beside the training, and the checks that detect torn ones.

A parameter and its optimizer's state change only when the optimizer steps: a hook makes the optimizer wait
for the copy. All other tensors are copied before `save` returns. A write that no hook sees voids the copy.
torch counts changes in place, except those through ``.data``, an accelerator's graph or a foreign kernel.
So the state is read again after the copy and compared byte for byte, and a sample of it is compared with
its values at the call of `save`. Of tensors on an accelerator, which adds numbers up faster than it hands them over,
a sum at the call is compared with one after the copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.engine.tree import Spread, State
from dlrover.checkpoint.machine.layout import name
from dlrover.errors import InfrastructureError

SAMPLED_TENSORS = 1024
"""Tensors above which only some are sampled: an optimizer's step changes all of them."""
SAMPLES = 16
"""Elements sampled per tensor, at equal distances. Each costs a cache miss."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integer types that show the bits of elements, by element size in bytes."""

_version = operator.attrgetter("_version")


class Background:
    """Background thread that runs one copy at a time; optimizers wait for it before they step."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def start(self, copy: Callable[[], None]) -> None:
        """Start a copy; the caller has waited for the last one."""
        self._running = self._pool.submit(copy)

    def wait(self) -> None:
        """Wait for the copy, if there is one.

        Raises:
            InfrastructureError: the copy failed.
        """
        running = self._running
        if running is not None:
            running.exception()  # if Ctrl-C comes meanwhile, optimizers still wait for it
            self._running = None
            running.result()

    def finish_all(self) -> None:
        """Wait also for a copy that Ctrl-C kept `start` from noting."""
        self._pool.submit(int).result()
        self.finish()

    def finish(self) -> None:
        """Wait for the copy, if there is one; leave its error to `wait`."""
        if self._running is not None:
            self._running.exception()

    def _before_step(self, *_: Any) -> None:
        self.finish()

    def close(self) -> None:
        """Remove the optimizer hook and stop the thread."""
        self._hook.remove()
        self._pool.shutdown()


class Guarded:
    """The tensors of a state that only its optimizers change."""

    def __init__(self) -> None:
        self._key: object = None
        self._changed: set[int] = set()
        self.unguarded: list[int] = []
        """All other tensors, by their number in the layout."""
        self.guarded: list[int] = []
        self.sample = ElementSample([])

    def look_at(self, state: State, copier: Copier) -> None:
        """Find the guarded and unguarded tensors; do nothing if all have the addresses of the last call."""
        sources = copier.sources
        key = [source.data_ptr() for source in sources]
        if key == self._key:
            return
        self._key = None  # until all is found: Ctrl-C may come before
        safe = {tensor.data_ptr() for tensor in _guarded(state)}
        self.unguarded, self.guarded = [], []
        for index, source in enumerate(sources):
            trusted = source.data_ptr() in safe and index not in self._changed
            known = self.guarded if trusted and _can_be_sampled(source) else self.unguarded
            known.append(index)
        self.sample = ElementSample([sources[index] for index in self.guarded])
        self._key = key

    def distrust(self, changed: list[int]) -> None:
        """Treat these tensors as unguarded from now on."""
        self._changed.update(changed)
        self._key = None


class ElementSample:
    """Sampled elements of tensors, seen as integers: a write to a whole tensor changes them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        every = -(-len(tensors) // SAMPLED_TENSORS) or 1
        views = [_elements(tensor) for tensor in tensors[::every] if tensor.numel()]
        kinds = operator.attrgetter("device.type", "device.index", "dtype")
        views.sort(key=lambda view: str(kinds(view)))
        self._kinds = [list(alike) for _, alike in groupby(views, key=kinds)]

    def take(self) -> list[torch.Tensor]:
        """Return the current elements."""
        with torch.no_grad():
            return [torch.cat(views) for views in self._kinds]

    def equals(self, before: list[torch.Tensor]) -> bool:
        """Return True if the current elements equal ``before``."""
        return all(map(torch.equal, self.take(), before))


def _can_be_sampled(tensor: torch.Tensor) -> bool:
    """Return True if the elements are contiguous in memory, in any order, and stored as they appear."""
    places = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    dense = not tensor.numel() or places == tensor.numel()
    return dense and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(_INTEGERS[tensor.itemsize])
    return flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]


class Snapshot:
    """The part of a state to keep before `save` returns, so that the copy can follow later."""

    def __init__(self, copier: Copier, guarded: Guarded) -> None:
        self._copier = copier
        sources = copier.sources
        with torch.no_grad():
            self._copies = [(index, sources[index].clone()) for index in guarded.unguarded]
        self._guarded = guarded.guarded
        self._near = [index for index in self._guarded if sources[index].is_cpu]
        self._far = [index for index in self._guarded if not sources[index].is_cpu]
        self._sums = self._summed()
        self._versions = self._current()
        self._sample = guarded.sample
        self._sampled = self._sample.take()

    def _current(self) -> list[int]:
        sources = self._copier.sources
        return [_version(sources[index]) for index in self._guarded]

    def _summed(self) -> list[torch.Tensor]:
        return [sum_of(self._copier.sources[index]) for index in self._far]

    def copy(self, buffer: torch.Tensor) -> list[int]:
        """Copy to a generation; return the tensors that changed meanwhile: with any, the copy is void."""
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
        changed = counted or self._copier.differing(buffer, self._near)
        with self._copier.beside():
            same = self._sample.equals(self._sampled)
            changed += [
                index
                for index, before, after in zip(self._far, self._sums, self._summed(), strict=True)
                if not torch.equal(before, after)
            ]
        return changed if changed or same else self._guarded


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a dense tensor's bytes as integers of at most 8 bytes, on its device."""
    with torch.no_grad():
        flat = tensor.as_strided((tensor.numel(),), (1,))
        whole = not (tensor.nbytes % 8 or tensor.data_ptr() % 8)
        return flat.view(torch.int64 if whole else _INTEGERS[tensor.itemsize]).sum(
            dtype=torch.int64
        )


def torn(step: int, copier: Copier, changed: list[int]) -> InfrastructureError:
    """Return the error for a copy that must be discarded."""
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
