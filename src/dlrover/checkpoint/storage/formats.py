"""The format version of data that one DLRover process writes and another one may read.

One number covers stored steps, the files beside them, and memory. Savers and workers of different formats do
not meet, because a saver's address contains the number. Data of another version is not damaged: it is refused
with a separate error and left unchanged.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import xxhash

from dlrover._util import decoding
from dlrover.checkpoint.storage.stores import StorageAwayError

FORMAT = 4
_WITHOUT = 1
"""Format of files that do not name one."""
_NO_SUM = "0" * 16
_Content = TypeVar("_Content")


class OtherFormatError(StorageAwayError):
    """The data was written by another version of DLRover, and this version cannot read it."""


class _Head(msgspec.Struct, frozen=True):
    format: int = _WITHOUT
    xxh3_64: str = ""
    """Checksum of the file with `_NO_SUM` in this place; the first ones of this format have none."""


def check(found: int, what: str) -> None:
    """Refuse data that another version has written.

    Raises:
        OtherFormatError: ``found`` is not this version's format.
    """
    if found != FORMAT:
        raise OtherFormatError(
            f"{what} was written by another version of DLRover: format {found}, this one reads {FORMAT}."
            " Use that version, or another checkpoint directory."
        )


def encode(content: msgspec.Struct) -> bytes:
    """Encode a file in this format (JSON), with a checksum."""
    head = _Head(FORMAT, _NO_SUM)
    data = msgspec.json.encode(msgspec.structs.asdict(head) | msgspec.structs.asdict(content))
    return data.replace(_NO_SUM.encode(), xxhash.xxh3_64_hexdigest(data).encode(), 1)


def decode(data: bytes, kind: type[_Content], what: str) -> _Content:
    """Decode a file made by `encode`.

    Raises:
        OtherFormatError: another version has written the file.
        msgspec.DecodeError: the file is damaged.
    """
    head = decoding.json(data, _Head)
    if head.xxh3_64:
        plain = data.replace(head.xxh3_64.encode(), _NO_SUM.encode(), 1)
        if xxhash.xxh3_64_hexdigest(plain) != head.xxh3_64:
            raise msgspec.DecodeError("its content differs from its checksum")
    check(head.format, what)
    return decoding.json(data, kind)
