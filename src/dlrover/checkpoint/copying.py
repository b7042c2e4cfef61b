"""Copies between live tensors and a generation's bytes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec
import torch

from dlrover.checkpoint import layout as layouts, tree
from dlrover.checkpoint.layout import SMALL, PackedLayout, Tensor, TensorEntry
from dlrover.checkpoint.tree import Flat

_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")


def views(buffer: torch.Tensor, entries: Sequence[TensorEntry]) -> list[torch.Tensor]:
    """The tensors in ``buffer`` (one dimension, uint8)."""
    return [
        buffer[entry.offset : entry.end].view(tree.DTYPES[entry.dtype]).view(entry.shape)
        for entry in entries
    ]


def view(data: memoryview, tensor: Tensor) -> torch.Tensor:
    """The tensor whose bytes are ``data``."""
    if not data:
        return torch.empty(tensor.shape, dtype=tree.DTYPES[tensor.dtype])
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return flat.view(tree.DTYPES[tensor.dtype]).view(tensor.shape)


class Copier:
    """Copies one rank's states, and remembers where things lay so that equal ones cost only the copy."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._plan: _Plan | None = None

    def layout(self, flat: Flat) -> PackedLayout:
        """Where the state goes.

        Raises:
            ConfigurationError: a tensor or a value cannot be kept.
        """
        known = self._known
        if known is None or not known.matches(flat):
            known = self._known = _Known(flat)
            self._plan = None
        return layouts.packed(known.encoded, layouts.encode(flat.packed), known.sizes)

    def copy(self, buffer: torch.Tensor) -> None:
        """Copy the state that `layout` was called with last."""
        assert self._known is not None
        if self._plan is None or self._plan.buffer is not buffer:
            self._plan = self._known.plan(buffer)
        self._plan.run()

    def forget(self) -> None:
        """Let go of the state's tensors and of the buffer."""
        self._known = self._plan = None


class _Known:
    """What was found out about a state's tensors, and is true as long as they stay where they are."""

    def __init__(self, flat: Flat) -> None:
        specs = tree.specs(flat)
        self._same = tree.same_tensors(flat.tensors)
        self.entries = layouts.place(specs, self._same)
        self.encoded = msgspec.Raw(msgspec.msgpack.encode(self.entries))
        self.sizes = (
            max((entry.end for entry in self.entries), default=0),
            len(self.entries),
            layouts.layout_hash(self.entries),
        )
        # Detached aliases keep the memory from being used for another tensor at the same address.
        self._sources = [tensor.detach() for tensor in flat.tensors]
        self._paths = flat.paths
        self._pointers = list(map(torch.Tensor.data_ptr, flat.tensors))
        self._strides = list(map(torch.Tensor.stride, flat.tensors))
        self._shapes = list(map(_shape, flat.tensors))
        self._dtypes = list(map(_dtype, flat.tensors))
        self._lazy = _lazy_bits(flat.tensors)
        self._placing = _placing(flat)
        self._plans: list[_Plan] = []

    def matches(self, flat: Flat) -> bool:
        """Whether the tensors are the same memory, seen in the same way, at the same paths."""
        tensors = flat.tensors
        return (
            len(tensors) == len(self._pointers)
            and list(map(torch.Tensor.data_ptr, tensors)) == self._pointers
            and list(map(_shape, tensors)) == self._shapes
            and list(map(_dtype, tensors)) == self._dtypes
            and list(map(torch.Tensor.stride, tensors)) == self._strides
            and flat.paths == self._paths
            and _lazy_bits(tensors) == self._lazy
            and _placing(flat) == self._placing
        )

    def plan(self, buffer: torch.Tensor) -> _Plan:
        """How to copy to a buffer; the last two are kept, one for each generation."""
        for plan in self._plans:
            if plan.buffer is buffer:
                return plan
        first = [index for index, same in enumerate(self._same) if index == same]
        made = _Plan(
            buffer,
            [self._sources[index] for index in first],
            [self.entries[index] for index in first],
        )
        self._plans = [*self._plans[-1:], made]
        return made


def _lazy_bits(tensors: list[torch.Tensor]) -> list[bool]:
    """Which tensors stand for the conjugate or the negative of their memory."""
    return [*map(torch.Tensor.is_conj, tensors), *map(torch.Tensor.is_neg, tensors)]


def _placing(flat: Flat) -> list[tuple[int, object]]:
    return [(index, tree.placing(value)) for index, value in flat.spread.items()]


class _Plan:
    """Calls that copy tensors to a buffer: one for each large tensor, one for each run of small ones."""

    def __init__(
        self, buffer: torch.Tensor, sources: list[torch.Tensor], entries: list[TensorEntry]
    ) -> None:
        self.buffer = buffer
        self._singles: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._runs: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for run in _runs(sources, entries):
            if len(run) == 1:
                source, entry = run[0]
                self._singles.append((views(buffer, [entry])[0], source))
            else:
                part = buffer[run[0][1].offset : run[-1][1].end].view(run[0][0].dtype)
                self._runs.append((part, [source.view(-1) for source, _ in run]))

    def run(self) -> None:
        """Copy."""
        with torch.no_grad():
            for target, source in self._singles:
                target.copy_(source)
            for target, sources in self._runs:
                torch.cat(sources, out=target)


def _runs(
    sources: list[torch.Tensor], entries: list[TensorEntry]
) -> Iterator[list[tuple[torch.Tensor, TensorEntry]]]:
    """Neighbours that one call can copy: packed, of one type, contiguous, in the host's memory.

    A run stays below `SMALL` elements: above that ``torch.cat`` copies tensor by tensor.
    """
    number, elements = 0, 0
    numbered: list[tuple[int, tuple[torch.Tensor, TensorEntry]]] = []
    before: TensorEntry | None = None
    for source, entry in zip(sources, entries, strict=True):
        plain = source.is_contiguous() and source.device.type == "cpu"
        plain = plain and not source.is_conj() and not source.is_neg()
        size = source.numel()
        joins = before is not None and before.end == entry.offset and before.dtype == entry.dtype
        if not (plain and joins and elements + size < SMALL):
            number, elements = number + 1, 0
        elements += size
        numbered.append((number, (source, entry)))
        before = entry if plain and size else None
    for _, group in groupby(numbered, key=lambda pair: pair[0]):
        yield [pair for _, pair in group]
