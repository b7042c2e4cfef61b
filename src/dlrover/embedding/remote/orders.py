"""Orders to servers about checkpoints, and their replies: the bodies of frames, as JSON."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from dlrover.errors import ProtocolError


class Export(msgspec.Struct, frozen=True):
    """Copy the rows of the server's slots: all, or those changed since the copy for ``parent``."""

    id: str
    """Checkpoint that the copy is for."""
    parent: str
    """Checkpoint that it adds to; empty: copy all rows."""
    version: int
    """Placement that the server must know."""


class Exported(msgspec.Struct, frozen=True):
    """What was copied."""

    slots: tuple[int, ...] = ()
    rows: int = 0
    refused: str = ""
    """Why nothing was copied: the last copy, or what was restored since, is not ``parent``."""


class Write(msgspec.Struct, frozen=True):
    """Write the copy to a store."""

    place: str
    id: str
    server: int


class Load(msgspec.Struct, frozen=True):
    """Replace all rows by those of a checkpoint."""

    place: str
    id: str
    version: int
    """Placement that the server must know."""


class RowsHeld(msgspec.Struct, frozen=True):
    """What a server answers for."""

    slots: tuple[int, ...]
    rows: dict[str, int]
    """Rows by table."""


Order = TypeVar("Order")


def decoded(body: bytes, kind: type[Order]) -> Order:
    """Return an order or a reply.

    Raises:
        ProtocolError: The bytes are none.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"An order to an embedding server cannot be read: {error}.") from error
