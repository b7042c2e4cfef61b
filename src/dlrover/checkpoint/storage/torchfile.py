"""The files of ``torch.save`` for single tensors, written without torch."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_SIZES64 = struct.Struct("<2H2Q")
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


class _Frame(NamedTuple):
    """The bytes around a tensor's data, cut at the two places of its checksum."""

    head: bytes
    name: bytes
    directory: bytes
    end: bytes


@functools.lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...], nbytes: int, at: int, alignment: int) -> _Frame:
    """Return what files of tensors of one type and shape have in common; ``at``: as for `torch_file`."""
    small = [
        (b"archive/data.pkl", _pickle(dtype, shape, nbytes)),
        (b"archive/version", b"3\n"),
        (b"archive/byteorder", b"little"),
    ]
    head, directory = bytearray(), bytearray()
    for name, content in small:
        crc = zlib.crc32(content)
        directory += _central(name, crc, len(content), len(head))
        head += _local(name, crc, len(content)) + content
    in_directory = len(directory) + _CENTRAL_CRC
    directory += _central(b"archive/data/0", 0, nbytes, len(head), wide=True)
    in_head = len(head) + _LOCAL_CRC
    unpadded = at + len(head) + len(_local(b"archive/data/0", 0, nbytes, wide=True, padding=0))
    padding = -unpadded % alignment
    head += _local(b"archive/data/0", 0, nbytes, wide=True, padding=padding)
    start = len(head) + nbytes
    end64 = _END64.pack(
        b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, len(small) + 1, len(small) + 1,
        len(directory), start,
    )  # fmt: skip
    locator = _LOCATOR64.pack(b"PK\6\7", 0, start + len(directory), 1)
    counts = (len(small) + 1, len(small) + 1)
    end = _END.pack(b"PK\5\6", 0, 0, *counts, len(directory), min(start, _BIG), 0)
    after = bytes(directory) + end64 + locator + end
    return _Frame(
        bytes(head[:in_head]), bytes(head[in_head + _CRC.size :]),
        after[:in_directory], after[in_directory + _CRC.size :],
    )  # fmt: skip


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
    extra = _SIZES64.pack(1, 16, size, size) if wide else b""
    shown = _BIG if wide else size
    header = _CENTRAL.pack(
        b"PK\1\2", _VERSION, _VERSION, 0, 0, *_MIDNIGHT, crc, shown, shown, len(name), len(extra),
        0, 0, 0, 0, offset,
    )  # fmt: skip
    return header + name + extra


def _pickle(dtype: str, shape: Sequence[int], nbytes: int) -> bytes:
    """Pickle the call ``_rebuild_tensor_v3(storage, 0, shape, strides, False, OrderedDict(), dtype)``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    storage = (
        b"(" + _text("storage") + b"ctorch.storage\nUntypedStorage\n" + _text("0") + _text("cpu")
        + _number(nbytes) + b"tQ"
    )  # fmt: skip
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n(" + storage + _number(0)
        + _numbers(shape) + _numbers(strides[::-1])
        + b"\x89ccollections\nOrderedDict\n)Rctorch\n" + dtype.encode() + b"\ntR."
    )  # fmt: skip


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(number: int) -> bytes:
    return b"\x8a\x09" + number.to_bytes(9, "little")


def _numbers(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t"
