"""States read from files of any supported format, tensor by tensor.

A step of this project becomes one state: sharded tensors are assembled from their parts. If ranks differ
in other values, the lowest rank that has them counts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, metadata as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

from dlrover.checkpoint.engine import buffers
from dlrover.checkpoint.engine.tree import DTYPE_NAMES, DTYPES
from dlrover.checkpoint.machine import extent, layout as layouts
from dlrover.checkpoint.machine.extent import Box, Extent, cover
from dlrover.checkpoint.machine.layout import name
from dlrover.checkpoint.storage.stored_step import StoredStep, StoredTensor

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader
except ImportError:  # it is private in earlier versions of torch, and warns in later ones
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from dlrover.checkpoint.storage.stores import (
    DCP_METADATA,
    MANIFEST,
    Store,
    explained,
    failure,
    is_url,
    open_store,
    step_folder,
)
from dlrover.checkpoint.tools import safetensorsfile, tools
from dlrover.checkpoint.tools.content import Content, LazyTensor, content_of
from dlrover.errors import ConfigurationError, InfrastructureError

_UNPICKLING = (
    pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError,
    ValueError,
)  # fmt: skip
"""Errors that a damaged pickle can raise."""


def read(
    place: str | os.PathLike[str], step: int | None = None, *, trusted: bool = False
) -> Content:
    """Read a directory or file, and detect its format.

    ``step`` picks one step of a checkpoint directory; the default is the newest. A DCP directory must be
    ``trusted``.

    Raises:
        ConfigurationError: the format is unknown, or the content cannot be kept.
        InfrastructureError: the content is damaged.
    """
    store = open_store(place)
    with explained(f"{store.location} cannot be used"):
        if not is_url(store.location):
            path = Path(place)
            if not path.exists():
                raise ConfigurationError(f"{path} does not exist.")
            if not path.is_dir():
                is_safe = path.suffix == ".safetensors"
                return safetensorsfile.read(path) if is_safe else _read_torch(path)
        if store.exists(MANIFEST):
            return _read_step(store, "")
        if store.exists(DCP_METADATA):
            return _read_dcp(store, trusted=trusted)
        return _read_step(store, step_folder(tools.chosen(place, step)))


# ---- DLRover steps


def _read_step(store: Store, folder: str) -> Content:
    with StoredStep(store, folder) as stored:
        ranks = _Ranks(stored)
        found = content_of(ranks.tree, stored.manifest.step, list(ranks.differing))
        return dataclasses.replace(found, metrics=stored.manifest.metrics)


class _Ranks:
    """The states of all ranks, merged into one."""

    def __init__(self, stored: StoredStep) -> None:
        self._stored = stored
        self.differing: dict[str, None] = {}
        found: dict[layouts.Path, list[StoredTensor]] = {}
        skeletons = []
        for rank in range(stored.manifest.world_size):
            index = stored.index(rank)
            skeletons.append(index.skeleton)
            for tensor in index.tensors:
                found.setdefault(tensor.path, []).append(tensor)
        held = {path: self._put_together(path, saved) for path, saved in found.items()}
        self.tree: Any = {}
        for skeleton in dict.fromkeys(skeletons):
            tree = layouts.replace_refs(layouts.decode(skeleton), lambda _, path: held[path])
            self.tree = self._merged(self.tree, tree, ()) if self.tree else tree

    def _merged(self, known: Any, more: Any, path: layouts.Path) -> Any:
        """Return the known state, extended by values that only another rank has; note differences."""
        if isinstance(known, dict) and isinstance(more, dict):
            both = {key: (*path, key) for key in known.keys() & more.keys()}
            agreed = {key: self._merged(known[key], more[key], at) for key, at in both.items()}
            return {**known, **more, **agreed}
        kind = type(known)
        if kind in (list, tuple) and kind is type(more) and len(known) == len(more):
            pairs = enumerate(zip(known, more, strict=True))
            return kind(self._merged(a, b, (*path, at)) for at, (a, b) in pairs)
        # Compared as text: nan is unequal to itself, and 1 is equal to True.
        if known is not more and repr(known) != repr(more):
            self.differing[name(path)] = None
        return known

    def _put_together(self, path: layouts.Path, saved: Sequence[StoredTensor]) -> LazyTensor:
        """Combine the saves of one tensor; each rank saved a part or all of it."""
        first = saved[0]
        whole = first.extent.whole
        parts: dict[Extent, StoredTensor] = {}
        for tensor in saved:
            known = parts.setdefault(tensor.extent, tensor)
            same = (known.dtype, known.xxh3) == (tensor.dtype, tensor.xxh3)
            if not same or tensor.extent.whole != whole:
                self._differs(tensor)
        alike = [(tensor.extent, tensor) for tensor in saved if tensor.dtype == first.dtype]
        pieces = cover(
            f"The tensor {name(path)}", extent.entire(whole), alike if first.part else alike[:1]
        )
        places = tuple((tensor.file, tensor.offset, box) for tensor, box in pieces)
        reads = [(box, functools.partial(self._read, tensor, box)) for tensor, box in pieces]
        join = functools.partial(buffers.joined, first.dtype, whole, reads)
        return LazyTensor(first.dtype, whole, places, join)

    def _read(self, tensor: StoredTensor, box: Box) -> torch.Tensor:
        return buffers.cut(buffers.view(self._stored.verified(tensor), tensor), box)

    def _differs(self, tensor: StoredTensor) -> None:
        if tensor.part is not None:
            raise ConfigurationError(
                f"Several ranks saved the same part of the tensor {name(tensor.path)}, with other content."
            )
        self.differing[name(tensor.path)] = None


# ---- DCP


def _read_dcp(store: Store, *, trusted: bool) -> Content:
    if not trusted:
        raise ConfigurationError(
            f"{store.where(DCP_METADATA)} is a pickle, and to read it runs whatever it says; pass trusted=True"
            " (dlrover ckpt convert: --trusted) if you trust its author."
        )
    reader = (FsspecReader if is_url(store.location) else FileSystemReader)(store.url)
    try:
        metadata = reader.read_metadata()
    except _UNPICKLING as error:
        where = store.where(DCP_METADATA)
        raise InfrastructureError(f"{where} cannot be read: {error}.") from error
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    paths = metadata.planner_data or {}
    tree: dict[Any, Any] = {}
    for key, described in metadata.state_dict_metadata.items():
        if isinstance(described, dcp.TensorStorageMetadata):
            value: Any = _dcp_tensor(reader, metadata, key)
        else:
            value = _ItemReading(reader, metadata, key, None).run()
        _put(tree, paths.get(key, (key,)), value)
    return content_of(_with_lists(tree))


def _dcp_tensor(reader: Any, metadata: Any, key: str) -> LazyTensor:
    described = metadata.state_dict_metadata[key]
    dtype = DTYPE_NAMES.get(described.properties.dtype)
    if dtype is None:
        raise ConfigurationError(
            f"The tensor {key} has the type {described.properties.dtype}, which is not supported."
        )
    whole = tuple(described.size)
    boxes = [Extent(whole, tuple(c.offsets), tuple(c.sizes)) for c in described.chunks]
    cover(f"The tensor {key}", extent.entire(whole), [(box, None) for box in boxes])
    places = [metadata.storage_data.get(dcp.MetadataIndex(key, box.at)) for box in boxes]
    same = tuple((at.relative_path, at.offset) for at in places if at is not None)

    def run() -> torch.Tensor:
        target = torch.empty(whole, dtype=DTYPES[dtype], device="cpu")
        _ItemReading(reader, metadata, key, target).run()
        return target

    return LazyTensor(dtype, whole, same or key, run)


class _ItemReading:
    """Reading of one item of a DCP checkpoint; DCP calls it to place the data."""

    def __init__(self, reader: Any, metadata: Any, key: str, target: torch.Tensor | None) -> None:
        self._reader, self._metadata = reader, metadata
        self._key, self._value = key, target

    def run(self) -> Any:
        """Read the item."""
        plan = create_default_local_load_plan({self._key: self._value}, self._metadata)
        try:
            self._reader.read_data(self._reader.prepare_local_plan(plan), self).wait()
        except pickle.UnpicklingError as error:
            raise ConfigurationError(f"{self._key} cannot be kept: {_reason(error)}") from error
        except OSError as error:
            where = f"{self._key} in {error.filename}" if error.filename else self._key
            raise failure(error, f"{where} cannot be read") from error
        except (RuntimeError, EOFError) as error:
            raise InfrastructureError(f"{self._key} cannot be read: {_reason(error)}") from error
        return self._value

    def load_bytes(self, _: Any, data: Any) -> None:
        """Store a plain value."""
        self._value = torch.load(data, weights_only=True)

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        """Return the target for a part of the tensor."""
        assert self._value is not None
        return self._value[Box(item.lengths, item.dest_offsets, item.dest_offsets).target]

    def commit_tensor(self, _: Any, __: torch.Tensor) -> None:
        """Do nothing: the part is in place."""


class _List(dict[int, Any]):
    """Incomplete list, by index."""


def _put(tree: dict[Any, Any], path: layouts.Path, value: Any) -> None:
    for key, below in itertools.pairwise(path):
        tree = tree.setdefault(key, {} if isinstance(below, str) else _List())
    tree[path[-1]] = value


def _with_lists(tree: Any) -> Any:
    """Convert incomplete lists to lists; a gap is an empty dict, because DCP stores none."""
    if isinstance(tree, _List):
        return [_with_lists(tree.get(index, {})) for index in range(max(tree) + 1)]
    if isinstance(tree, dict):
        return {key: _with_lists(item) for key, item in tree.items()}
    return tree


# ---- files


def _read_torch(path: Path) -> Content:
    try:
        state = torch.load(
            path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
        )
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ConfigurationError(
            f"{path} is no file that torch.load can read: {_reason(error)}"
        ) from error
    return content_of(state)


def _reason(error: Exception) -> str:
    """Return torch's error message without its advice."""
    found = re.search(r"(?:WeightsUnpickler error:\s*|(?=Trying to load ))(.+)", str(error))
    return found[1] if found else str(error).partition("\n")[0]
