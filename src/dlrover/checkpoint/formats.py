"""The format of what one process of DLRover writes and another one may find.

One number counts for stored steps, for what lies beside them and for memory; savers and workers of different
formats do not meet, since the address of a saver has the number in it. What another version has written is not
damaged: it is refused with an error of its own, and stays as it is.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dlrover.checkpoint.stores import StorageAwayError

FORMAT = 2
_WITHOUT = 1
"""The format of files that do not name one."""
_Content = TypeVar("_Content")


class OtherFormatError(StorageAwayError):
    """Another version of DLRover has written it, and this one cannot read it."""


class _Head(msgspec.Struct, frozen=True):
    format: int = _WITHOUT


def check(found: int, what: str) -> None:
    """Refuse what another version has written.

    Raises:
        OtherFormatError: it has.
    """
    if found != FORMAT:
        raise OtherFormatError(
            f"{what} was written by another version of DLRover: format {found}, this one reads {FORMAT}."
            " Use that version, or another checkpoint directory."
        )


def encode(content: msgspec.Struct) -> bytes:
    """A file of this format (JSON)."""
    known: dict[str, Any] = {"format": FORMAT, **msgspec.structs.asdict(content)}
    return msgspec.json.encode(known)


def decode(data: bytes, kind: type[_Content], what: str) -> _Content:
    """The content of a file that `encode` made.

    Raises:
        OtherFormatError: another version has written it.
        msgspec.DecodeError: it is damaged.
    """
    check(msgspec.json.decode(data, type=_Head).format, what)
    return msgspec.json.decode(data, type=kind)
