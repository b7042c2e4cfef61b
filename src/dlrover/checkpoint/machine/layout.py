"""The layout of a rank's state in memory: the place of each tensor, and the plain values around them.

A state is a tree of dicts, lists and tuples whose leaves are tensors or plain values. It is kept as a
list of its tensors and a *skeleton*: the tree in MessagePack, with a `TensorRef` in place of each tensor.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from dlrover.checkpoint.machine.extent import Extent, entire
from dlrover.errors import ConfigurationError, InfrastructureError

Path = tuple[str | int, ...]
"""The keys and indices from the root of a state to a leaf."""

ALIGNMENT = 64
"""Alignment of tensors in bytes, unless they are packed behind small ones of their type."""
SMALL = 32768
"""Number of elements below which neighbours of one type are packed, so that one call copies them all."""
MAX_DEPTH = 100
"""Maximum number of levels in a state; a deeper one is assumed to contain itself."""

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8,
    "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4,
    "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes per element of each supported tensor type, by torch's names."""

_TUPLE, _TENSOR, _INTEGER, _COUNTER = 1, 2, 3, 4
_SCALARS = (type(None), bool, int, float, str, bytes)
_INT64 = range(-(2**63), 2**64)


class TensorPart(msgspec.Struct, frozen=True, array_like=True):
    """The position of an entry in a tensor that is spread over ranks."""

    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    at: tuple[int, ...]
    """The start of the part in each dimension."""
    owner: int
    """The lowest rank that has the same part."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has of a tensor, wherever it is stored."""

    path: Path
    dtype: str
    """Torch's name of the element type."""
    shape: tuple[int, ...]
    part: TensorPart | None
    """The position in a tensor that is spread over ranks; None if each rank has all of it."""

    @property
    def extent(self) -> Extent:
        """The position in the whole tensor."""
        part = self.part
        return entire(self.shape) if part is None else Extent(part.whole, part.at, self.shape)


class TensorEntry(TensorSpec, frozen=True, array_like=True):
    """A tensor in memory, dense and in row-major order. Tied tensors have entries with the same offset."""

    offset: int
    """Bytes from the start of the data."""
    nbytes: int

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.offset + self.nbytes


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """All tensors of a state, and its skeleton."""

    entries: tuple[TensorEntry, ...]
    skeleton: bytes
    hash: int
    """`layout_hash` of the entries, which rarely change; the skeleton changes from step to step."""


class PackedLayout(NamedTuple):
    """An encoded `Layout`."""

    encoded: bytes
    """`Layout` in MessagePack."""
    data_bytes: int
    tensors: int
    layout_hash: int
    index_hash: int
    """Hash of ``encoded``."""


class TensorRef(msgspec.Struct, frozen=True):
    """Placeholder in a skeleton for tensor ``index`` of the layout."""

    index: int


def place(specs: Sequence[TensorSpec], same_as: Sequence[int]) -> tuple[TensorEntry, ...]:
    """Give each tensor its place.

    ``same_as[i]`` is the index of the first tensor tied to tensor ``i``, or ``i``: tied ones are kept once.
    """
    entries: list[TensorEntry] = []
    end, before = 0, ""
    for index, spec in enumerate(specs):
        dtype, elements = spec.dtype, math.prod(spec.shape)
        nbytes = elements * ITEM_BYTES[dtype]
        if same_as[index] != index:
            offset = entries[same_as[index]].offset
        else:
            packed = elements < SMALL and dtype == before
            offset = end if packed else -(-end // ALIGNMENT) * ALIGNMENT
            end = offset + nbytes
            before = dtype if elements < SMALL else ""
        entries.append(TensorEntry(spec.path, dtype, spec.shape, spec.part, offset, nbytes))
    return tuple(entries)


def packed(entries: msgspec.Raw, skeleton: bytes, sizes: tuple[int, int, int]) -> PackedLayout:
    """Return a layout whose entries are already encoded; ``sizes``: bytes of data, tensors, hash."""
    index = msgspec.msgpack.encode((entries, skeleton, sizes[2]))
    return PackedLayout(index, *sizes, xxhash.xxh3_64_intdigest(index))


def layout_hash(entries: msgspec.Raw) -> int:
    """Return a hash of encoded entries, the same for equal ones."""
    return xxhash.xxh3_64_intdigest(entries)


def check(layout: Layout, data_bytes: int) -> None:
    """Refuse a layout, read from memory, that does not fit ``data_bytes`` of data.

    Raises:
        InfrastructureError: the layout does not fit.
    """
    for entry in layout.entries:
        item = check_tensor(entry, entry.nbytes)
        if entry.offset < 0 or entry.end > data_bytes or entry.offset % item:
            raise InfrastructureError(f"The tensor {name(entry.path)} lies outside of the data.")


def check_tensor(spec: TensorSpec, nbytes: int) -> int:
    """Refuse a tensor, read from memory or storage, that cannot have ``nbytes``; return bytes per element.

    Raises:
        InfrastructureError: its size, type or part is impossible.
    """
    item = ITEM_BYTES.get(spec.dtype, 0)
    if not item or min(spec.shape, default=0) < 0 or nbytes != math.prod(spec.shape) * item:
        raise InfrastructureError(f"The tensor {name(spec.path)} has an impossible size or type.")
    if spec.part is not None and not spec.extent.fits():
        raise InfrastructureError(f"{name(spec.path)} is no part of its tensor.")
    return item


def name(path: Path) -> str:
    """Return a path as DCP writes it: the keys joined by dots."""
    return ".".join(map(str, path)) or "the state itself"


# ---- skeletons


def pack(
    value: Any,
    path: Path,
    leaf: Callable[[Any, Path], Any],
    whole: Callable[[dict[Any, Any], Path], msgspec.Raw | None] | None = None,
) -> Any:
    """Convert the tree ``value`` to an equal one that msgspec can encode.

    ``leaf`` is called with each value that is neither a plain scalar nor a container, and with its path.
    It returns a packed tensor (`pack_ref`), or a value that is packed instead. ``whole`` may return the
    packed form of a dict; if it returns None, the items are packed one by one.

    Raises:
        ConfigurationError: a leaf or a key cannot be kept; the message names its path.
    """
    kind = type(value)
    if isinstance(value, dict):
        _check_depth(path)
        encoded = whole(value, path) if whole is not None else None
        if encoded is not None:
            return encoded
        packed = {}
        for key, item in value.items():
            if type(key) is not str:
                _check_key(key, path)
            packed[key] = pack(item, (*path, key), leaf, whole)
        return (
            packed if kind is not Counter else msgspec.msgpack.Ext(_COUNTER, encode(packed, path))
        )
    if kind is list or kind is tuple:
        _check_depth(path)
        items = [pack(item, (*path, index), leaf, whole) for index, item in enumerate(value)]
        return items if kind is list else msgspec.msgpack.Ext(_TUPLE, encode(items, path))
    if kind is int and value not in _INT64:
        return msgspec.msgpack.Ext(_INTEGER, str(value).encode())
    if kind in _SCALARS:
        return value
    replaced = leaf(value, path)
    if replaced is value:
        raise ConfigurationError(
            f"{name(path)} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, objects"
            " with state_dict, and None, bool, int, float, str, bytes, list, tuple and dict."
        )
    return replaced if type(replaced) is msgspec.msgpack.Ext else pack(replaced, path, leaf, whole)


@functools.lru_cache(maxsize=1 << 16)
def pack_ref(index: int) -> Any:
    """Return the packed form of ``TensorRef(index)``."""
    return msgspec.msgpack.Ext(_TENSOR, index.to_bytes(8, "big"))


def encode(packed: Any, path: Path = ()) -> bytes:
    """Encode a packed tree as a skeleton.

    Raises:
        ConfigurationError: a text has no UTF-8 form.
    """
    try:
        return msgspec.msgpack.encode(packed)
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{name(path)} holds text that is not Unicode: {error}."
        ) from error


def decode(skeleton: bytes) -> Any:
    """Decode a skeleton to its tree, with `TensorRef` for tensors.

    Raises:
        InfrastructureError: the bytes are not a skeleton.
    """
    try:
        return msgspec.msgpack.decode(skeleton, ext_hook=_unpack, strict=False)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise InfrastructureError(
            f"The plain values of a checkpoint are damaged: {error}."
        ) from error


def replace_refs(tree: Any, replace: Callable[[TensorRef, Path], Any], path: Path = ()) -> Any:
    """Return a decoded tree with ``replace(ref, path)`` in place of each `TensorRef`."""
    if isinstance(tree, TensorRef):
        return replace(tree, path)
    if isinstance(tree, dict):
        return type(tree)(
            {key: replace_refs(item, replace, (*path, key)) for key, item in tree.items()}
        )
    if isinstance(tree, list | tuple):
        return type(tree)(replace_refs(item, replace, (*path, i)) for i, item in enumerate(tree))
    return tree


def _check_key(key: Any, path: Path) -> None:
    if type(key) is not int or key not in _INT64:
        raise ConfigurationError(f"{name(path)} has the key {key!r}; keys are str or 64-bit int.")


def _check_depth(path: Path) -> None:
    if len(path) > MAX_DEPTH:
        raise ConfigurationError(
            f"{name(path[:5])}... is nested deeper than {MAX_DEPTH} levels, or contains itself."
        )


def _unpack(code: int, data: memoryview) -> Any:
    if code == _TENSOR:
        return TensorRef(int.from_bytes(data, "big"))
    if code == _INTEGER:
        return int(bytes(data))
    kind = {_TUPLE: tuple, _COUNTER: Counter}.get(code)
    if kind is not None:
        return kind(msgspec.msgpack.decode(data, ext_hook=_unpack, strict=False))
    raise ValueError(f"unknown extension {code}")
