"""The files of ``torch.save``, written without torch."""

from __future__ import annotations

import functools
import itertools
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from dlrover.checkpoint.machine.layout import ALIGNMENT, TensorRef

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


def torch_file(
    dtype: str, shape: Sequence[int], data: memoryview, at: int, alignment: int
) -> tuple[bytes, bytes]:
    """Return the bytes that make ``data``, a tensor's in row-major order, a file of ``torch.save``: before, after.

    Such a file is a zip archive: a pickle that says how to rebuild the tensor, and the tensor's raw bytes. The
    pickle holds only names and numbers, so ``torch.load`` with ``weights_only=True`` reads it. DCP stores each
    tensor in this form; it is written here without torch.

    ``at`` is the start of the result in a larger file; it places the data at a multiple of ``alignment``.
    """
    frame = _frame(dtype, tuple(shape), len(data), at % alignment, alignment)
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
        result += _aligned(name, crc, len(data), len(result), ALIGNMENT) + data
    return bytes(result + _end(directory, len(contents), len(result)))


class _Frame(NamedTuple):
    """The bytes around a tensor's data, cut at the two places of its checksum."""

    head: bytes
    name: bytes
    directory: bytes
    end: bytes


@functools.lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...], nbytes: int, at: int, alignment: int) -> _Frame:
    """Return what files of tensors of one type and shape have in common; ``at``: as for `torch_file`."""
    head, directory = _begin(b"\x80\2" + _tensor(dtype, shape, nbytes) + b".")
    in_directory = len(directory) + _CENTRAL_CRC
    directory += _central(b"archive/data/0", 0, nbytes, len(head), wide=True)
    in_head = len(head) + _LOCAL_CRC
    head += _aligned(b"archive/data/0", 0, nbytes, at + len(head), alignment)
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


def _aligned(name: bytes, crc: int, nbytes: int, at: int, alignment: int) -> bytes:
    """Return the header, at ``at``, of a tensor's data, which then begin at a multiple of ``alignment``."""
    padding = -(at + len(_local(name, crc, nbytes, wide=True, padding=0))) % alignment
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
        b"(" + text("storage") + b"ctorch.storage\nUntypedStorage\n" + text(key) + text("cpu")
        + _number(nbytes) + b"tQ"
    )  # fmt: skip
    return (
        b"ctorch._utils\n_rebuild_tensor_v3\n(" + storage + _number(0)
        + _numbers(shape) + _numbers(strides[::-1])
        + b"\x89ccollections\nOrderedDict\n)Rctorch\n" + dtype.encode() + b"\ntR"
    )  # fmt: skip


def text(value: str) -> bytes:
    """Pickle a text."""
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _number(number: int) -> bytes:
    return b"\x8a\x09" + number.to_bytes(9, "little")


def _numbers(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t"
