"""How records lie in a file: one frame for each batch that a producer has pushed.

A frame is a head, the producer's name, and the records, each after its length. The head has a checksum of all
that follows it, so a frame that was cut off by a crash is seen. Numbers are big-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dlrover.errors import InfrastructureError

HEAD = struct.Struct(">IIQIHQ")
"""Checksum, bytes behind the head, first offset, records, bytes of the producer's name, sequence."""
_CHECKED = 4
_LENGTH = struct.Struct(">I")


class Frame(NamedTuple):
    """A batch of records, as it lies at ``position`` of a file."""

    position: int
    size: int
    """Bytes, with the head."""
    offset: int
    """Of the first record."""
    number: int
    """How many records."""
    producer: str
    sequence: int
    checksum: int


def packed(offset: int, producer: str, sequence: int, records: Sequence[bytes]) -> bytes:
    """The bytes of a frame."""
    name = producer.encode()
    body = b"".join([name, *(part for r in records for part in (_LENGTH.pack(len(r)), r))])
    head = HEAD.pack(0, len(body), offset, len(records), len(name), sequence)
    return _LENGTH.pack(zlib.crc32(body, zlib.crc32(head[_CHECKED:]))) + head[_CHECKED:] + body


def content(records: Sequence[bytes]) -> int:
    """A checksum of what a producer pushed, wherever it comes to lie."""
    sum_ = 0
    for record in records:
        sum_ = zlib.crc32(record, zlib.crc32(_LENGTH.pack(len(record)), sum_))
    return sum_


def size(data: bytes) -> int:
    """The size of the frame that begins with these bytes; 0 if they are no head."""
    if len(data) < HEAD.size:
        return 0
    return HEAD.size + int(HEAD.unpack_from(data)[1])


def unpacked(data: bytes, position: int) -> tuple[Frame, list[bytes]]:
    """The frame in these bytes.

    Raises:
        InfrastructureError: it is damaged.
    """
    whole = size(data)
    if not whole or len(data) < whole:
        raise InfrastructureError(f"the frame at byte {position} is cut off")
    checksum, _, offset, count, name_size, sequence = HEAD.unpack_from(data)
    if zlib.crc32(data[_CHECKED:whole]) != checksum:
        raise InfrastructureError(f"the frame at byte {position} is damaged")
    records = list(_records(data[HEAD.size + name_size : whole]))
    producer = data[HEAD.size : HEAD.size + name_size].decode()
    frame = Frame(position, whole, offset, count, producer, sequence, content(records))
    return frame, records


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        yield data[at - length : at]
