"""The bytes around a tensor that make it a file of ``torch.save``, written without torch.

Such a file is a zip archive: a pickle that says how to rebuild the tensor, and the tensor's raw bytes. DCP
stores each tensor in this form. The pickle holds only names and numbers, so ``torch.load`` with
``weights_only=True`` reads it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

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


def wrap(
    dtype: str, shape: Sequence[int], data: memoryview, at: int, alignment: int
) -> tuple[bytes, bytes]:
    """Return the bytes before and after ``data``, a tensor's bytes in row-major order.

    ``at`` is the start of the result in a larger file; it places the data at a multiple of ``alignment``.
    """
    small = [
        (b"archive/data.pkl", _pickle(dtype, shape, len(data))),
        (b"archive/version", b"3\n"),
        (b"archive/byteorder", b"little"),
    ]
    head, directory = bytearray(), bytearray()
    for name, content in small:
        crc = zlib.crc32(content)
        directory += _central(name, crc, len(content), len(head))
        head += _local(name, crc, len(content)) + content
    crc = zlib.crc32(data)
    directory += _central(b"archive/data/0", crc, len(data), len(head), wide=True)
    unpadded = at + len(head) + len(_local(b"archive/data/0", crc, len(data), wide=True, padding=0))
    padding = -unpadded % alignment
    head += _local(b"archive/data/0", crc, len(data), wide=True, padding=padding)
    start = len(head) + len(data)
    end64 = _END64.pack(
        b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, len(small) + 1, len(small) + 1,
        len(directory), start,
    )  # fmt: skip
    locator = _LOCATOR64.pack(b"PK\6\7", 0, start + len(directory), 1)
    counts = (len(small) + 1, len(small) + 1)
    end = _END.pack(b"PK\5\6", 0, 0, *counts, len(directory), min(start, _BIG), 0)
    return bytes(head), bytes(directory) + end64 + locator + end


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
