"""Framing of messages on local sockets and pipes: 4 bytes of length (big-endian), then the message.

Only the standard library's `struct` is imported: a zygote uses this module.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

MAX_FRAME = 4 * 1024 * 1024
"""Maximum bytes of a message, unless the receiver sets another limit."""
_LENGTH = struct.Struct(">I")


class FrameTooLongError(ValueError):
    """Raised before a message that exceeds the receiver's limit is read."""


def pack(message: bytes) -> bytes:
    """Return a message as a frame."""
    return _LENGTH.pack(len(message)) + message


def fill(view: memoryview, read: Callable[[memoryview], int]) -> None:
    """Read until ``view`` is full.

    Args:
        view: The buffer.
        read: Reads into a buffer and returns the number of bytes: ``recv_into`` of a socket, ``readinto`` of
            a file.

    Raises:
        ConnectionError: The peer has closed the connection.
    """
    while view:
        more = read(view)
        if not more:
            raise _closed()
        view = view[more:]


def receive(read: Callable[[memoryview], int], most: int = MAX_FRAME) -> bytearray:
    """Read the next message of at most ``most`` bytes, with ``read`` as `fill` does.

    Raises:
        ConnectionError: The peer has closed the connection.
        FrameTooLongError: The message exceeds ``most``.
    """
    length = bytearray(_LENGTH.size)
    fill(memoryview(length), read)
    message = bytearray(_length(length, most))
    fill(memoryview(message), read)
    return message


async def read(reader: asyncio.StreamReader, most: int = MAX_FRAME) -> bytes:
    """Read the next message as `receive` does.

    Raises:
        ConnectionError: The peer has closed the connection.
        FrameTooLongError: The message exceeds ``most``.
    """
    try:
        return await reader.readexactly(_length(await reader.readexactly(_LENGTH.size), most))
    except EOFError as error:
        raise _closed() from error


def take(buffer: bytearray) -> list[bytes]:
    """Remove the complete frames from the front of ``buffer`` and return their messages."""
    found = []
    while len(buffer) >= _LENGTH.size:
        end = _LENGTH.size + _length(buffer, MAX_FRAME)
        if len(buffer) < end:
            break
        found.append(bytes(buffer[_LENGTH.size : end]))
        del buffer[:end]
    return found


def _length(data: bytes | bytearray, most: int) -> int:
    (length,) = _LENGTH.unpack_from(data)
    if length > most:
        raise FrameTooLongError(f"a message of {length} bytes exceeds the limit of {most}")
    return int(length)


def _closed() -> ConnectionError:
    return ConnectionResetError("the peer has closed the connection")
