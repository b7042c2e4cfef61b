"""What makes a directory a checkpoint of ``torch.distributed.checkpoint``: names, objects, metadata.

DCP names the leaves of a state by their paths, joined by dots. It follows every dict, and every list that
holds tensors, dicts or such lists; all else is one object, stored by ``torch.save``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from dlrover.checkpoint import layout as layouts
from dlrover.checkpoint.layout import TensorRef
from dlrover.checkpoint.storage import StoredTensor
from dlrover.checkpoint.tree import DTYPES
from dlrover.errors import ConfigurationError


class Leaf(NamedTuple):
    """One item of a DCP checkpoint."""

    path: layouts.Path
    value: Any

    @property
    def name(self) -> str:
        """DCP's name for it."""
        return ".".join(map(str, self.path))


class Item(NamedTuple):
    """Where it lies."""

    file: str
    offset: int
    length: int


def leaves(skeleton: bytes) -> list[Leaf]:
    """The items of a state, tensors as `TensorRef`.

    Raises:
        ConfigurationError: two of them have the same name.
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
        yield Leaf(path, value)


def _is_followed(value: list[Any]) -> bool:
    return any(
        isinstance(item, TensorRef | dict) or (isinstance(item, list) and _is_followed(item))
        for item in value
    )


def encode_object(value: Any, tensor: Callable[[int], tuple[StoredTensor, memoryview]]) -> bytes:
    """An object as DCP stores it; ``tensor`` finds those that a tuple in it holds."""

    def filled(value: Any) -> Any:
        if isinstance(value, TensorRef):
            stored, data = tensor(value.index)
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
            return flat.view(DTYPES[stored.dtype]).view(stored.shape)
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(filled, value))
        return value

    buffer = io.BytesIO()
    torch.save(filled(value), buffer)
    return buffer.getvalue()


def metadata(
    found: list[Leaf], tensors: tuple[StoredTensor, ...], objects: dict[str, Item]
) -> bytes:
    """The content of the file ``.metadata``."""
    described: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for leaf in found:
        if isinstance(leaf.value, TensorRef):
            tensor = tensors[leaf.value.index]
            shape = torch.Size(tensor.shape)
            offsets = torch.Size([0] * len(shape))
            described[leaf.name] = dcp.TensorStorageMetadata(
                properties=dcp.TensorProperties(dtype=DTYPES[tensor.dtype]),
                size=shape,
                chunks=[dcp.ChunkStorageMetadata(offsets=offsets, sizes=shape)],
            )
            index = dcp.MetadataIndex(leaf.name, offset=offsets, index=0)
            places[index] = _StorageInfo(tensor.file, *tensor.item)
        else:
            described[leaf.name] = dcp.BytesStorageMetadata()
            places[dcp.MetadataIndex(leaf.name)] = _StorageInfo(*objects[leaf.name])
    return pickle.dumps(
        dcp.Metadata(
            state_dict_metadata=described,
            planner_data={leaf.name: leaf.path for leaf in found},
            storage_data=places,
            storage_meta=dcp.StorageMeta(),
        )
    )
