"""What savers of different nodes say to each other, over TCP.

Each message is its length (4 bytes, most significant first) and MessagePack, and is bounded. The sender
says `Hello`, then offers one generation after the other; each is answered before its data is sent, and
after.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec

from dlrover.checkpoint.memory import Header
from dlrover.errors import ProtocolError

CHUNK = 1 << 20
"""Bytes of a generation in one message."""
MAX_MESSAGE = CHUNK + (1 << 12)
"""Bytes of the largest message."""
MAX_HELLO = 1 << 10
"""Bytes of the first one, from whoever it may be."""
_LENGTH = struct.Struct(">I")


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """Who sends. Answered by `Answer`."""

    session: int
    token: bytes
    format: int = 1
    """The last field, so that every version can read it."""


class Offer(Message, frozen=True):
    """A generation. Answered by `Answer`."""

    header: Header


class Chunk(Message, frozen=True):
    """Some of what follows a generation's header page: data, index and checksums."""

    offset: int
    data: bytes


class Commit(Message, frozen=True):
    """All of it has been sent. Answered by `Answer`."""

    sums_hash: int
    """XXH3, 64 bits, of the checksums."""


class GiveUp(Message, frozen=True):
    """The rest will not come."""


class Answer(Message, frozen=True):
    """What the receiver says."""

    wanted: bool
    """Whether the sender may go on."""
    problem: str = ""
    """Why not; empty: there is no need."""


AnyMessage = Hello | Offer | Chunk | Commit | GiveUp | Answer
_Message = TypeVar("_Message", bound=Message)
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def send(sock: socket.socket, message: Message) -> None:
    """Send one message."""
    data = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket, most: int = MAX_MESSAGE) -> AnyMessage:
    """The next message, of at most so many bytes.

    Raises:
        ConnectionError: the peer is gone.
        ProtocolError: it is not a message.
    """
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    if length > most:
        raise ProtocolError(f"A message of {length} bytes is longer than {most}.")
    try:
        message: AnyMessage = _decoder.decode(_read(sock, length))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"A saver sent what is not a message: {error}.") from error
    return message


def expect(sock: socket.socket, kind: type[_Message], most: int = MAX_MESSAGE) -> _Message:
    """The next message, which must be of one kind.

    Raises:
        ConnectionError: the peer is gone.
        ProtocolError: it is another one.
    """
    message = receive(sock, most)
    if not isinstance(message, kind):
        raise ProtocolError(f"A saver sent {type(message).__name__}, not {kind.__name__}.")
    return message


def _read(sock: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("The other saver is gone.")
        view = view[count:]
    return data
