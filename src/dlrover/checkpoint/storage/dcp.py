"""The format of ``torch.distributed.checkpoint`` (DCP): names, objects and metadata.

DCP names the leaves of a state by their paths, joined by dots. It follows every dict, and every list that
holds tensors, dicts or such lists; everything else is one object, stored by ``torch.save``.
"""

from __future__ import annotations

import functools
import math
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.extent import Numbers
from dlrover.checkpoint.machine.layout import TensorRef
from dlrover.checkpoint.storage.stored_step import StoredTensor
from dlrover.checkpoint.storage.torchfile import text
from dlrover.errors import ConfigurationError, InfrastructureError

_HOME = b"ctorch.distributed.checkpoint.metadata\n"
_METADATA = _HOME + b"Metadata\n"
_STORAGE_META = _HOME + b"StorageMeta\n"
_TENSOR = _HOME + b"TensorStorageMetadata\n"
_CHUNK = _HOME + b"ChunkStorageMetadata\n"
_OBJECT = _HOME + b"BytesStorageMetadata\n"
_INDEX = _HOME + b"MetadataIndex\n"
_INFO = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n"
_SIZE = b"ctorch\nSize\n"
"""Opcodes of a pickle that name the classes."""
_NEW, _BUILD, _DICT, _END_DICT = b")\x81}(", b"ub", b"}(", b"u"
"""Opcodes that begin an instance and give it its attributes, and that begin and end a dict."""


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


class _Chunks(NamedTuple):
    """A tensor: its type and size, and the start and size of each of its stored parts."""

    dtype: str
    size: Numbers
    chunks: list[tuple[Numbers, Numbers]]


_Place: TypeAlias = tuple[str, Numbers | None]
"""The name of an item, and the start of the part if it is a tensor."""


def metadata(
    ranks: Iterable[tuple[Sequence[Leaf], Sequence[StoredTensor]]], objects: Mapping[str, Item]
) -> bytes:
    """Return the content of the file ``.metadata``.

    Args:
        ranks: each rank's items and tensors. For a tensor that each rank has as a whole, the first
            rank's counts.
        objects: where rank 0's plain values are stored.
    """
    described: dict[str, _Chunks | None] = dict.fromkeys(objects)
    places: dict[_Place, tuple[int | None, Item]] = {
        (name, None): (None, item) for name, item in objects.items()
    }
    paths: dict[str, layouts.Path] = {}
    for number, (items, tensors) in enumerate(ranks):
        for leaf in items:
            if isinstance(leaf.value, TensorRef):
                _add_chunk(described, places, leaf.name, tensors[leaf.value.index])
            if number == 0 or leaf.name in described:
                paths.setdefault(leaf.name, leaf.path)
    return _pickle(described, paths, places)


def _add_chunk(
    described: dict[str, _Chunks | None],
    places: dict[_Place, tuple[int | None, Item]],
    name: str,
    tensor: StoredTensor,
) -> None:
    whole, at, shape = tensor.extent
    if name not in described:
        described[name] = _Chunks(tensor.dtype, whole, [])
    known = described[name]
    if known is None or known.size != whole:
        return  # another rank's; DCP has one tensor per name
    if (name, at) not in places and (tensor.nbytes or not math.prod(whole)):
        places[name, at] = (len(known.chunks), Item(tensor.file, *tensor.item))
        known.chunks.append((at, shape))


_Key: TypeAlias = str | Numbers | bytes


class _Opcodes(dict[_Key, bytes]):
    """The opcodes for a text, a ``torch.Size`` or what else they make: the first time; then the way back to it.

    The first opcodes must come first in the pickle.
    """

    def __missing__(self, key: _Key) -> bytes:
        if isinstance(key, str):
            made = text(key)
        elif isinstance(key, tuple):
            made = self[_SIZE] + b"(" + b"".join(map(_integer, key)) + b"t\x85R"
        else:
            made = key
        number = struct.pack("<I", len(self))
        self[key] = b"j" + number
        return made + b"r" + number


def _pickle(
    described: Mapping[str, _Chunks | None],
    paths: Mapping[str, layouts.Path],
    places: Mapping[_Place, tuple[int | None, Item]],
) -> bytes:
    """Pickle DCP's ``Metadata``: what `pickle.dumps` returns for it, without torch."""
    of = _Opcodes()
    parts = [b"\x80\4", of[_METADATA], _NEW, of["state_dict_metadata"], _DICT]
    for name, tensor in described.items():
        if tensor is None:
            parts += (of[name], of[_OBJECT], b")\x81")
            continue
        parts += (
            of[name], of[_TENSOR], _NEW, of["properties"], of[_properties(tensor.dtype)],
            of["size"], of[tensor.size], of["chunks"], b"](",
        )  # fmt: skip
        for at, shape in tensor.chunks:
            parts += (of[_CHUNK], _NEW, of["offsets"], of[at], of["sizes"], of[shape], _BUILD)
        parts += (b"e", _BUILD)
    parts += (_END_DICT, of["planner_data"], _DICT)
    for name, path in paths.items():
        parts += (of[name], b"(")
        parts += [of[key] if isinstance(key, str) else _integer(key) for key in path]
        parts.append(b"t")
    parts += (_END_DICT, of["storage_data"], _DICT)
    for (name, start), (number, item) in places.items():
        parts += (of[_INDEX], _NEW, of["fqn"], of[name], of["index"], _integer(number))
        if start is not None:
            parts += (of["offset"], of[start])
        parts += (
            _BUILD, of[_INFO], _NEW, of["relative_path"], of[item.file],
            of["offset"], _integer(item.offset), of["length"], _integer(item.length), _BUILD,
        )  # fmt: skip
    parts += (_END_DICT, of["storage_meta"], of[_STORAGE_META], _NEW)
    for field in ("checkpoint_id", "save_id", "load_id"):
        parts += (of[field], b"N")
    parts += (of["modules"], b"]", _BUILD, of["version"], b"N", _BUILD, b".")
    return b"".join(parts)


def _integer(number: int | None) -> bytes:
    return pickle.dumps(number, protocol=2)[2:-1]


@functools.cache
def _properties(dtype: str) -> bytes:
    if dtype not in layouts.ITEM_BYTES:
        raise InfrastructureError(f"A rank's index has a tensor of the impossible type {dtype!r}.")
    return (
        _HOME + b"TensorProperties\n)\x81(ctorch\n" + dtype.encode() + b"\n"
        + b"ctorch.serialization\n_get_layout\n" + text("torch.strided") + b"\x85R\x89"
        + _HOME + b"_MEM_FORMAT_ENCODING\nK\0\x85R\x89tb"
    )  # fmt: skip
