"""Protocol between the savers of different nodes, over TCP.

Each message is its length (4 bytes, most significant first) and MessagePack, and is bounded in size. The
sender says `SaverHello`, then offers one generation after the other; the receiver answers each one before and
after its data is sent.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec

from dlrover._util import decoding
from dlrover.checkpoint.saver.memory import Header
from dlrover.errors import ProtocolError

CHUNK = 1 << 20
"""Maximum bytes of a generation in one message."""
MAX_MESSAGE = CHUNK + (1 << 12)
"""Maximum bytes of a message."""
MAX_HELLO = 1 << 10
"""Maximum bytes of the first message, from an unknown peer."""
_LENGTH = struct.Struct(">I")


class TransferMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class SaverHello(TransferMessage, frozen=True):
    """Identification of the sender. Answered by `TransferReply`."""

    session: int
    token: bytes
    format: int = 1
    """Format of the checkpoints; the last field, so that every version can read it."""


class GenerationOffer(TransferMessage, frozen=True):
    """Offer of a generation. Answered by `TransferReply`."""

    header: Header


class Chunk(TransferMessage, frozen=True):
    """Part of the content after a generation's header page: data, index and checksums."""

    offset: int
    data: bytes


class CommitGeneration(TransferMessage, frozen=True):
    """End of a generation that was sent completely. Answered by `TransferReply`."""

    sums_hash: int
    """XXH3 hash, 64 bits, of the checksums."""


class GiveUp(TransferMessage, frozen=True):
    """Notice that the rest of a generation will not come."""


class TransferReply(TransferMessage, frozen=True):
    """Reply of the receiver."""

    wanted: bool
    """True if the sender may continue."""
    problem: str = ""
    """Reason for a refusal; empty if nothing went wrong."""


AnyMessage = SaverHello | GenerationOffer | Chunk | CommitGeneration | GiveUp | TransferReply
_Message = TypeVar("_Message", bound=TransferMessage)
_decoder = decoding.msgpack_decoder(AnyMessage)


def send(sock: socket.socket, message: TransferMessage) -> None:
    """Send one message."""
    data = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket, most: int = MAX_MESSAGE) -> AnyMessage:
    """Receive the next message, of at most ``most`` bytes.

    Raises:
        ConnectionError: the peer is gone.
        ProtocolError: the data is not a message, or is too long.
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
    """Receive the next message, which must be of one kind.

    Raises:
        ConnectionError: the peer is gone.
        ProtocolError: the message is of another kind.
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
