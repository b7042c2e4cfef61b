"""Copies of a rank's state to a generation's bytes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.engine.buffers import (
    Places,
    SideStream,
    Words,
    are_plain,
    check_memory,
    device_of,
    views,
)
from dlrover.checkpoint.engine.tree import Flat, State
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import SMALL, PackedLayout, TensorEntry
from dlrover.checkpoint.saver.memory import kernels, spans
from dlrover.checkpoint.saver.protocol import GENERATIONS

_libc = ctypes.CDLL(None)
_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")
_itemsize = operator.attrgetter("itemsize")
_nbytes = torch.UntypedStorage.nbytes

BLOCK = 512
"""Number of tensors that a walk asks everything before it goes on, while they are in the processor's cache."""


class LoadTargets(NamedTuple):
    """The tensors of a state, in the order of its layout, as memory that a load overwrites."""

    entries: Sequence[TensorEntry]
    tensors: Sequence[torch.Tensor]
    pointers: Words
    """Addresses of the tensors."""
    direct: npt.NDArray[np.bool_]
    """True for tensors that are plain memory; a tied one counts once."""
    places: Places


class Copier:
    """Copier of one rank's states, which remembers their layout so that equal ones cost only the copy."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._dicts: dict[layouts.Path, tree.KnownDict] = {}
        self._bare = False
        self._plan: _CopyPlan | None = None
        self._stream: SideStream | None = None
        self.threads = 1
        """Maximum number of threads that copy."""
        self.sums: Words | None = None
        """Checksums of the tensors that `copy` wrote; None if they were not computed."""

    def layout_of(self, state: State) -> PackedLayout:
        """Return the layout of a state, which `copy` will read.

        Raises:
            ConfigurationError: a tensor or a value cannot be kept.
        """
        return self.layout(tree.flatten(state, self._dicts))

    def layout(self, flat: Flat) -> PackedLayout:
        """Return the layout of a flat state, which `copy` will read.

        Raises:
            ConfigurationError: a tensor or a value cannot be kept.
        """
        known = self._known
        if known is None or not known.takes(flat):
            self._plan = None
            known = self._known = _Known(flat)
        self._bare = flat.bare
        return known.packed(layouts.encode(flat.packed))

    @property
    def targets(self) -> LoadTargets | None:
        """The tensors of the state that `layout` last received; None if a load needs more than to overwrite them."""
        return self._known.targets() if self._known is not None and self._bare else None

    @property
    def device(self) -> torch.device | None:
        """The accelerator that holds the state; None if the state is in host memory."""
        assert self._known is not None
        return self._known.device

    def mark(self) -> None:
        """Make `copy` wait for the work that the device has queued until now."""
        if self.device is not None:
            if self._stream is None:
                self._stream = SideStream(self.device)
            self._stream.mark()

    def copy(self, buffer: torch.Tensor) -> None:
        """Copy the state that `layout` last received, as it was at `mark`."""
        assert self._known is not None
        if self._plan is None or self._plan.buffer is not buffer:
            self._plan = self._known.plan(buffer)
        with self.beside():
            self.sums = self._plan.run(self.threads)

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Run the block's work on an accelerator beside the training, after `mark`."""
        if self.device is None or self._stream is None:
            return contextlib.nullcontext()
        return self._stream.use()

    def forget(self) -> None:
        """Release the state's tensors and the buffer."""
        self._known = self._plan = self._stream = self.sums = None
        self._dicts.clear()

    # ---- for copies beside the training

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors that `copy` reads, in the order of the layout."""
        assert self._known is not None
        return self._known.sources

    def put(self, buffer: torch.Tensor, index: int, tensor: torch.Tensor) -> None:
        """Write one tensor of the layout."""
        assert self._known is not None
        with self.beside():
            target = views(buffer, [self._known.entries[index]])[0]
            target.copy_(tensor)
        if self.sums is not None:
            pointers, sizes = (np.array([n], np.uint64) for n in (target.data_ptr(), target.nbytes))
            self.sums[index] = kernels().hash(pointers, sizes)[0]

    def differing(self, buffer: torch.Tensor, indices: Sequence[int]) -> list[int]:
        """Return the indices of tensors whose bytes in ``buffer`` differ from the current state."""
        assert self._known is not None
        known = self._known
        with self.beside():
            return [
                index
                for index in indices
                if not _equal_bytes(known.sources[index], views(buffer, [known.entries[index]])[0])
            ]

    def path(self, index: int) -> layouts.Path:
        """Return a tensor's path in the state."""
        assert self._known is not None
        return self._known.entries[index].path


def _equal_bytes(source: torch.Tensor, copied: torch.Tensor) -> bool:
    """Compare memory: a NaN equals itself, and 0.0 differs from -0.0."""
    plain = source.is_cpu and source.is_contiguous() and not (source.is_conj() or source.is_neg())
    again = source if plain else torch.empty_like(copied).copy_(source)
    pointers = ctypes.c_void_p(again.data_ptr()), ctypes.c_void_p(copied.data_ptr())
    return not _libc.memcmp(*pointers, ctypes.c_size_t(copied.nbytes))


class _Known:
    """Cached properties of a state's tensors, valid while the tensors keep their kind and ties."""

    def __init__(self, flat: Flat) -> None:
        specs = tree.specs(flat)
        self._same = tree.same_tensors(flat.tensors)
        self.entries = layouts.place(specs, self._same)
        self._places = offsets, sizes = spans(self.entries)
        self._encoded = msgspec.Raw(msgspec.msgpack.encode(self.entries))
        self._sizes = (
            int((offsets + sizes).max(initial=0)),
            len(self.entries),
            layouts.layout_hash(self._encoded),
        )
        self._packed: tuple[bytes, PackedLayout] | None = None
        # Detached aliases keep the memory from being reused for another tensor at the same address.
        self.sources = list(map(torch.Tensor.detach, flat.tensors))
        self._storages = list(map(torch.Tensor.untyped_storage, self.sources))
        self._sizes_of_storages = _sizes(self._storages)
        self.device = device_of(flat.tensors)
        self._paths = flat.paths
        self._pointers = _addresses(flat.tensors)
        self._placing = _placing(flat)
        self._first = np.array(self._same, np.intp) == np.arange(len(self.entries))
        self._plain = are_plain(flat.tensors)
        self._plans: list[_CopyPlan] = []
        self._check_memory()

    @functools.cached_property
    def _kinds(self) -> _Kinds:
        return _Kinds(self.sources)

    def _check_memory(self) -> None:
        count = len(self.sources)
        start = np.fromiter(map(torch.Tensor.storage_offset, self.sources), np.int64, count)
        start *= np.fromiter(map(_itemsize, self.sources), np.int64, count)
        there = self._sizes_of_storages
        suspect = there < start + self._places[1].astype(np.int64)
        suspect |= ~np.fromiter(map(torch.Tensor.is_contiguous, self.sources), np.bool_, count)
        for index in np.flatnonzero(suspect).tolist():
            check_memory(self.sources[index], self._paths[index])

    def packed(self, skeleton: bytes) -> PackedLayout:
        """Return the layout with these plain values."""
        if self._packed is None or skeleton != self._packed[0]:
            self._packed = skeleton, layouts.packed(self._encoded, skeleton, self._sizes)
        return self._packed[1]

    def takes(self, flat: Flat) -> bool:
        """Return whether the tensors are of the same kind at the same paths; they may have moved."""
        tensors = flat.tensors
        if flat.paths != self._paths or _placing(flat) != self._placing:
            return False
        pointers = self._kinds.addresses(tensors, self._pointers)
        # A storage that was made smaller, and perhaps larger again, may be at its old address.
        if pointers is None or not np.array_equal(_sizes(self._storages), self._sizes_of_storages):
            return False
        return np.array_equal(pointers, self._pointers) or self._follow(tensors, pointers)

    def _follow(self, tensors: list[torch.Tensor], pointers: Words) -> bool:
        """Adopt tensors that have moved; return False if ties between tensors or a device have changed."""
        if tree.same_tensors(tensors) != self._same:
            return False
        for index in np.flatnonzero(pointers != self._pointers).tolist():
            if tensors[index].device != self.sources[index].device:
                return False
            check_memory(tensors[index], self._paths[index])
            # Ctrl-C may come between any two of these: until all are done, the tensor counts as moved.
            self._pointers[index] = 0
            self.sources[index] = tensors[index].detach()
            self._storages[index] = self.sources[index].untyped_storage()
            self._sizes_of_storages[index] = self._storages[index].nbytes()
            for plan in self._plans:
                plan.replace(index, self.sources[index])
            self._pointers[index] = pointers[index]
        return True

    def plan(self, buffer: torch.Tensor) -> _CopyPlan:
        """Return the plan for a buffer; keep as many plans as there are generations."""
        for plan in self._plans:
            if plan.buffer is buffer:
                return plan
        made = _CopyPlan(buffer, self.targets(), self._same)
        self._plans = [*self._plans[1 - GENERATIONS :], made]
        return made

    def targets(self) -> LoadTargets:
        """Return the tensors as memory."""
        direct = self._first & self._plain
        return LoadTargets(self.entries, self.sources, self._pointers, direct, self._places)


_Kind = tuple[list[torch.Size], list[torch.dtype], list[tuple[int, ...]], list[bool], list[bool]]
"""What the copy of tensors depends on, besides their places: shapes, types, strides, and lazy operations."""
_Comparison = Callable[..., bool]
"""Takes tensors; returns whether they are of the kinds of those that it was made of."""


def _kind(tensors: list[torch.Tensor]) -> _Kind:
    kind = torch.Tensor
    dtypes = list(map(_dtype, tensors))
    # Where all are contiguous, the strides follow from the shapes.
    usual = all(map(kind.is_contiguous, tensors))
    strides = [] if usual else list(map(kind.stride, tensors))
    may_conjugate = any(dtype.is_complex for dtype in set(dtypes))
    conjugate = list(map(kind.is_conj, tensors)) if may_conjugate else []
    return list(map(_shape, tensors)), dtypes, strides, list(map(kind.is_neg, tensors)), conjugate


def _comparison(tensors: list[torch.Tensor]) -> _Comparison | None:
    """Return PyTorch's own comparison of kinds, one call for all; None if it does not take these tensors.

    It is private to ``torch.compile``, and refuses a tensor that occurs twice.
    """
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError, SystemError):
        guards = torch._C._dynamo.guards.TensorGuards(  # noqa: SLF001
            *tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[]
        )
        compare: _Comparison = guards.check
        return compare if compare(*tensors) else None
    return None


@functools.cache
def _comparison_sees_all() -> bool:
    """Return whether this version of PyTorch has a comparison that tells apart all that `_kind` does."""
    tensor = torch.zeros(2, 2, dtype=torch.complex64, device="cpu")
    negative = torch._neg_view(tensor)  # noqa: SLF001
    # Each differs in one thing.
    others = [tensor.conj(), negative, tensor.T, tensor[:1], tensor.view(torch.float64)]
    compare = _comparison([tensor])
    return compare is not None and compare(tensor.clone()) and not any(map(compare, others))


class _Kinds:
    """The kinds of a state's tensors, by blocks."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._kinds = [_kind(block) for block in _blocks(tensors)]
        self._compare = _comparison if _comparison_sees_all() else lambda _block: None
        self._comparisons: list[_Comparison | None] = [None] * len(self._kinds)

    def addresses(self, tensors: list[torch.Tensor], last: Words) -> Words | None:
        """Return the addresses of as many tensors of the same kinds, which had the last ones; None if a kind differs."""
        pointers = np.empty(len(tensors), np.uint64)
        for number, block in enumerate(_blocks(tensors)):
            place = slice(number * BLOCK, (number + 1) * BLOCK)
            try:
                pointers[place] = here = _addresses(block)
            except (RuntimeError, TypeError, ValueError):
                return None  # one has no memory
            # PyTorch's comparison of a nested tensor, which must have come with memory of its own, ends the process.
            moved = np.flatnonzero((here != last[place]) | (here == 0)).tolist()
            if any(block[index].is_nested for index in moved) or not self._are(number, block):
                return None
        return pointers

    def _are(self, number: int, block: list[torch.Tensor]) -> bool:
        compare = self._comparisons[number]
        if compare is not None and compare(*block):
            return True
        if not tree.are_usual(block) or _kind(block) != self._kinds[number]:
            return False
        # The comparison sees more than matters here, such as whether a gradient is required.
        self._comparisons[number] = self._compare(block)
        return True


def _addresses(tensors: list[torch.Tensor]) -> Words:
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))


def _sizes(storages: list[torch.UntypedStorage]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(_nbytes, storages), np.int64, len(storages))


def _blocks(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    return (tensors[start : start + BLOCK] for start in range(0, len(tensors), BLOCK))


def _placing(flat: Flat) -> list[tuple[int, object]]:
    return [(index, tree.placing(value)) for index, value in flat.spread.items()]


_Item = tuple[int, torch.Tensor, TensorEntry]
"""Index, tensor and place."""


class _CopyPlan:
    """Copy of tensors to a buffer: one native call for all plain ones, torch calls for the rest.

    Without the compiled library, torch copies all: one call per large tensor, one per run of small ones.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        state: LoadTargets,
        same: Sequence[int],
    ) -> None:
        self.buffer = buffer
        entries, sources = state.entries, state.tensors
        self._pointers = state.pointers
        """The current addresses of the sources; the owner updates them in place."""
        self._kernels = kernels()
        self._hashed = self._kernels.native and device_of(sources) is None
        self._same = np.array(same, np.intp)
        offsets, self._sizes = state.places
        self._targets = offsets + np.uint64(buffer.data_ptr())
        first = self._same == np.arange(len(entries))
        plain = state.direct & self._hashed
        self._pieces = np.flatnonzero(plain)
        self._rest = np.flatnonzero(first & ~plain)
        items = [(index, sources[index], entries[index]) for index in self._rest.tolist()]
        self._calls: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._places: dict[int, tuple[int, int]] = {}
        for run in _runs(items):
            if len(run) == 1:
                target, parts = views(buffer, [run[0][2]])[0], [run[0][1]]
            else:
                target = buffer[run[0][2].offset : run[-1][2].end].view(run[0][1].dtype)
                parts = [source.view(-1) for _, source, _ in run]
            for number, (index, _, _) in enumerate(run):
                self._places[index] = len(self._calls), number
            self._calls.append((target, parts))

    def replace(self, index: int, source: torch.Tensor) -> None:
        """Copy another tensor of the same kind from now on."""
        if index in self._places:
            call, number = self._places[index]
            parts = self._calls[call][1]
            parts[number] = source.view(-1) if len(parts) > 1 else source

    def run(self, threads: int) -> Words | None:
        """Copy all tensors; return their checksums, or None if torch has copied all of them."""
        with torch.no_grad():
            for target, parts in self._calls:
                if len(parts) == 1:
                    target.copy_(parts[0], non_blocking=True)
                else:
                    torch.cat(parts, out=target)
        if not self._hashed:
            return None
        pieces, rest, sizes = self._pieces, self._rest, self._sizes
        sums = np.zeros(len(sizes), np.uint64)
        sums[pieces] = self._kernels.copy_hash(
            self._pointers[pieces], self._targets[pieces], sizes[pieces], threads
        )
        sums[rest] = self._kernels.hash(self._targets[rest], sizes[rest], threads)
        return sums[self._same]


def _runs(items: list[_Item]) -> Iterator[list[_Item]]:
    """Yield runs of neighbours that one call can copy: packed, of one type, contiguous, in host memory.

    A run stays below `SMALL` elements: above that ``torch.cat`` copies tensor by tensor.
    """
    number, elements = 0, 0
    numbered: list[tuple[int, _Item]] = []
    before: TensorEntry | None = None
    for item in items:
        _, source, entry = item
        plain = source.is_contiguous() and source.device.type == "cpu"
        plain = plain and not source.is_conj() and not source.is_neg()
        size = source.numel()
        joins = before is not None and before.end == entry.offset and before.dtype == entry.dtype
        if not (plain and joins and elements + size < SMALL):
            number, elements = number + 1, 0
        elements += size
        numbered.append((number, item))
        before = entry if plain and size else None
    for _, group in groupby(numbered, key=lambda pair: pair[0]):
        yield [item for _, item in group]
