"""The format of ``torch.distributed.checkpoint`` (DCP): names, objects and metadata.

DCP names the leaves of a state by their paths, joined by dots. It follows every dict, and every list that
holds tensors, dicts or such lists; everything else is one object, stored by ``torch.save``.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from dlrover.checkpoint.engine.tree import DTYPES
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import TensorRef
from dlrover.checkpoint.storage.stored_step import StoredTensor
from dlrover.errors import ConfigurationError


class Leaf(NamedTuple):
    """One item of a DCP checkpoint."""

    name: str
    """DCP's name for the item: its path, joined by dots."""
    path: layouts.Path
    value: Any


class Item(NamedTuple):
    """The place of an item in a file, in bytes."""

    file: str
    offset: int
    length: int


def leaves(skeleton: bytes) -> list[Leaf]:
    """Return the items of a state, with tensors as `TensorRef`.

    Raises:
        ConfigurationError: two items have the same name.
    """
    tree = layouts.decode(skeleton)
    found = list(_leaves(tree, ()))
    names = set()
    for leaf in found:
        if leaf.name in names:
            raise ConfigurationError(
                f"Two values of the state are named {leaf.name} in the DCP format; rename one of them."
            )
        names.add(leaf.name)
    return found


def _leaves(value: Any, path: layouts.Path) -> Iterator[Leaf]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, list) and _is_followed(value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield Leaf(".".join(map(str, path)), path, value)


def _is_followed(value: list[Any]) -> bool:
    return any(
        isinstance(item, TensorRef | dict) or (isinstance(item, list) and _is_followed(item))
        for item in value
    )


def encode_object(value: Any, tensor: Callable[[int], tuple[StoredTensor, memoryview]]) -> bytes:
    """Encode an object as DCP stores it; ``tensor`` looks up the tensors in its tuples."""

    def live(ref: TensorRef, _: layouts.Path) -> torch.Tensor:
        stored, data = tensor(ref.index)
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        return flat.view(DTYPES[stored.dtype]).view(stored.shape)

    buffer = io.BytesIO()
    torch.save(layouts.replace_refs(value, live), buffer)
    return buffer.getvalue()


def metadata(
    ranks: Iterable[tuple[Sequence[Leaf], Sequence[StoredTensor]]], objects: Mapping[str, Item]
) -> bytes:
    """Return the content of the file ``.metadata``.

    Args:
        ranks: each rank's items and tensors. For a tensor that each rank has as a whole, the first
            rank's counts.
        objects: where rank 0's plain values are stored.
    """
    described: dict[str, Any] = {name: dcp.BytesStorageMetadata() for name in objects}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {
        dcp.MetadataIndex(name): _StorageInfo(*item) for name, item in objects.items()
    }
    paths: dict[str, layouts.Path] = {}
    for number, (items, tensors) in enumerate(ranks):
        for leaf in items:
            if isinstance(leaf.value, TensorRef):
                _add_chunk(described, places, leaf.name, tensors[leaf.value.index])
            if number == 0 or leaf.name in described:
                paths.setdefault(leaf.name, leaf.path)
    return pickle.dumps(
        dcp.Metadata(
            state_dict_metadata=described,
            planner_data=paths,
            storage_data=places,
            storage_meta=dcp.StorageMeta(),
        )
    )


@functools.cache
def _properties(dtype: str) -> dcp.TensorProperties:
    return dcp.TensorProperties(dtype=DTYPES[dtype])


@functools.lru_cache(maxsize=4096)
def _size(numbers: tuple[int, ...]) -> torch.Size:
    """Return one object for equal sizes: the pickle then holds it once."""
    return torch.Size(numbers)


def _add_chunk(
    described: dict[str, Any],
    places: dict[dcp.MetadataIndex, _StorageInfo],
    name: str,
    tensor: StoredTensor,
) -> None:
    whole, at, shape = map(_size, tensor.extent)
    known = described.get(name)
    if known is None:
        known = described[name] = dcp.TensorStorageMetadata(
            properties=_properties(tensor.dtype), size=whole, chunks=[]
        )
    if not isinstance(known, dcp.TensorStorageMetadata) or known.size != whole:
        return  # another rank's; DCP has one tensor per name
    index = dcp.MetadataIndex(name, offset=at, index=len(known.chunks))
    if index not in places and (tensor.nbytes or not whole.numel()):
        known.chunks.append(dcp.ChunkStorageMetadata(offsets=at, sizes=shape))
        places[index] = _StorageInfo(tensor.file, *tensor.item)
