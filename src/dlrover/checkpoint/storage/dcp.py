"""The format of ``torch.distributed.checkpoint`` (DCP): names, objects, metadata, and the files of ``torch.save``.

DCP names the leaves of a state by their paths, joined by dots. It follows every dict, and every list that
holds tensors, dicts or such lists; everything else is one object, stored by ``torch.save``. Nothing here needs torch.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.extent import Numbers
from dlrover.checkpoint.machine.layout import ALIGNMENT, TensorRef
from dlrover.checkpoint.storage.stored_step import StoredTensor
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
    return _pickled(described, paths, places)


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
            made = _text(key)
        elif isinstance(key, tuple):
            made = self[_SIZE] + b"(" + b"".join(map(_integer, key)) + b"t\x85R"
        else:
            made = key
        number = struct.pack("<I", len(self))
        self[key] = b"j" + number
        return made + b"r" + number


def _pickled(
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
        + b"ctorch.serialization\n_get_layout\n" + _text("torch.strided") + b"\x85R\x89"
        + _HOME + b"_MEM_FORMAT_ENCODING\nK\0\x85R\x89tb"
    )  # fmt: skip


# ---- files of torch.save

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_SIZES64 = struct.Struct("<2H2Q")
_PLACE64 = struct.Struct("<2H3Q")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_PADDING = struct.Struct("<2H")
_PADDING_ID = 0x4246  # the ID that torch uses
_BIG = 0xFFFFFFFF
_VERSION = 45  # of the zip format: the first with 64-bit sizes
_MIDNIGHT = (0, 0x21)  # 1980-01-01, the earliest time that zip knows
_CRC = struct.Struct("<L")
_LOCAL_CRC, _CENTRAL_CRC = 14, 16
"""Positions of the checksum in the two kinds of headers."""


def torch_file(dtype: str, shape: Sequence[int], data: memoryview, at: int) -> tuple[bytes, bytes]:
    """Return the bytes that make ``data``, a tensor's in row-major order, a file of ``torch.save``: before, after.

    Such a file is a zip archive: a pickle that says how to rebuild the tensor, and the tensor's raw bytes. The
    pickle holds only names and numbers, so ``torch.load`` with ``weights_only=True`` reads it. DCP stores each
    tensor in this form.

    ``at`` is the start of the result in a larger file; it places the data at a multiple of `ALIGNMENT`.
    """
    frame = _frame(dtype, tuple(shape), len(data), at % ALIGNMENT)
    crc = _CRC.pack(zlib.crc32(data))
    return frame.head + crc + frame.name, frame.directory + crc + frame.end


def object_file(
    value: Any, tensor: Callable[[int], tuple[str, Sequence[int], memoryview]]
) -> bytes:
    """Return a decoded skeleton, or a part of one, as a file of ``torch.save``.

    ``tensor`` looks up what takes the place of a `TensorRef`: type, shape and data in row-major order.
    """
    contents: list[memoryview] = []

    def save(reference: TensorRef) -> bytes:
        dtype, shape, data = tensor(reference.index)
        contents.append(data)
        return _tensor(dtype, shape, len(data), str(len(contents) - 1))

    pickled = pickle.dumps(value, protocol=2)
    if TensorRef.__name__.encode() in pickled:  # a tensor, or a text that says so
        pickled = b"\x80\2" + _pickle(value, save) + b"."
    result, directory = _begin(pickled)
    for number, data in enumerate(contents):
        name, crc = b"archive/data/%d" % number, zlib.crc32(data)
        directory += _central(name, crc, len(data), len(result), wide=True)
        result += _aligned(name, crc, len(data), len(result)) + data
    return bytes(result + _end(directory, len(contents), len(result)))


class _Frame(NamedTuple):
    """The bytes around a tensor's data, cut at the two places of its checksum."""

    head: bytes
    name: bytes
    directory: bytes
    end: bytes


@functools.lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...], nbytes: int, at: int) -> _Frame:
    """Return what files of tensors of one type and shape have in common; ``at``: as for `torch_file`."""
    head, directory = _begin(b"\x80\2" + _tensor(dtype, shape, nbytes) + b".")
    in_directory = len(directory) + _CENTRAL_CRC
    directory += _central(b"archive/data/0", 0, nbytes, len(head), wide=True)
    in_head = len(head) + _LOCAL_CRC
    head += _aligned(b"archive/data/0", 0, nbytes, at + len(head))
    after = _end(directory, 1, len(head) + nbytes)
    return _Frame(
        bytes(head[:in_head]), bytes(head[in_head + _CRC.size :]),
        after[:in_directory], after[in_directory + _CRC.size :],
    )  # fmt: skip


def _begin(pickled: bytes) -> tuple[bytearray, bytearray]:
    """Return the first files of an archive, and the directory of them."""
    head, directory = bytearray(), bytearray()
    for name, content in (
        (b"archive/data.pkl", pickled),
        (b"archive/version", b"3\n"),
        (b"archive/byteorder", b"little"),
    ):
        crc, wide = zlib.crc32(content), len(content) >= _BIG
        directory += _central(name, crc, len(content), len(head), wide=wide or len(head) >= _BIG)
        head += _local(name, crc, len(content), wide=wide) + content
    return head, directory


def _end(directory: bytearray, tensors: int, start: int) -> bytes:
    """Return the end of an archive: its directory, which begins at ``start``, and what leads to it."""
    count, size = tensors + 3, len(directory)
    end64 = _END64.pack(
        b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, start
    )
    locator = _LOCATOR64.pack(b"PK\6\7", 0, start + size, 1)
    shown = min(count, 0xFFFF)
    end = _END.pack(b"PK\5\6", 0, 0, shown, shown, min(size, _BIG), min(start, _BIG), 0)
    return bytes(directory) + end64 + locator + end


def _aligned(name: bytes, crc: int, nbytes: int, at: int) -> bytes:
    """Return the header, at ``at``, of a tensor's data, which then begin at a multiple of `ALIGNMENT`."""
    padding = -(at + len(_local(name, crc, nbytes, wide=True, padding=0))) % ALIGNMENT
    return _local(name, crc, nbytes, wide=True, padding=padding)


def _local(
    name: bytes, crc: int, size: int, *, wide: bool = False, padding: int | None = None
) -> bytes:
    extra = _SIZES64.pack(1, 16, size, size) if wide else b""
    if padding is not None:
        extra += _PADDING.pack(_PADDING_ID, padding) + bytes(padding)
    shown = _BIG if wide else size
    header = _LOCAL.pack(
        b"PK\3\4", _VERSION, 0, 0, *_MIDNIGHT, crc, shown, shown, len(name), len(extra)
    )
    return header + name + extra


def _central(name: bytes, crc: int, size: int, offset: int, *, wide: bool = False) -> bytes:
    extra = _PLACE64.pack(1, 24, size, size, offset) if wide else b""
    shown = _BIG if wide else size
    header = _CENTRAL.pack(
        b"PK\1\2", _VERSION, _VERSION, 0, 0, *_MIDNIGHT, crc, shown, shown, len(name), len(extra),
        0, 0, 0, 0, _BIG if wide else offset,
    )  # fmt: skip
    return header + name + extra


def _pickle(value: Any, tensor: Callable[[TensorRef], bytes]) -> bytes:
    """Pickle a value, without first and last opcodes, with ``tensor(ref)`` in place of each `TensorRef`."""
    items: Iterable[Any]
    match value:
        case TensorRef():
            return tensor(value)
        case dict():
            begin, items, end = b"}(", itertools.chain.from_iterable(value.items()), b"u"
        case list():
            begin, items, end = b"](", value, b"e"
        case tuple():
            begin, items, end = b"(", value, b"t"
        case _:
            return pickle.dumps(value, protocol=2)[2:-1]
    return begin + b"".join(_pickle(item, tensor) for item in items) + end


def _tensor(dtype: str, shape: Sequence[int], nbytes: int, key: str = "0") -> bytes:
    """Pickle the call ``_rebuild_tensor_v3(storage, 0, shape, strides, False, OrderedDict(), dtype)``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    storage = (
        b"(" + _text("storage") + b"ctorch.storage\nUntypedStorage\n" + _text(key) + _text("cpu")
        + _number(nbytes) + b"tQ"
    )  # fmt: skip
    return (
        b"ctorch._utils\n_rebuild_tensor_v3\n(" + storage + _number(0)
        + _numbers(shape) + _numbers(strides[::-1])
        + b"\x89ccollections\nOrderedDict\n)Rctorch\n" + dtype.encode() + b"\ntR"
    )  # fmt: skip


def _text(value: str) -> bytes:
    """Pickle a text."""
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _number(number: int) -> bytes:
    return b"\x8a\x09" + number.to_bytes(9, "little")


def _numbers(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t"
