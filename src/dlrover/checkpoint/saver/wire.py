"""Protocol between the savers of different nodes, over TCP.

Each message is MessagePack in a frame (`dlrover._util.framing`), and is bounded in size. The sender says
`SaverHello`, then offers one generation after the other; the receiver answers each one before and after its
data is sent.
"""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from dlrover._util import decoding, framing
from dlrover.checkpoint.saver.memory import Header
from dlrover.errors import ProtocolError

CHUNK = 1 << 20
"""Maximum bytes of a generation in one message."""
MAX_MESSAGE = CHUNK + (1 << 12)
"""Maximum bytes of a message."""
MAX_HELLO = 1 << 10
"""Maximum bytes of the first message, from an unknown peer."""


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
    sock.sendall(framing.pack(msgspec.msgpack.encode(message)))


def receive(sock: socket.socket, most: int = MAX_MESSAGE) -> AnyMessage:
    """Receive the next message, of at most ``most`` bytes.

    Raises:
        ConnectionError: the peer is gone.
        ProtocolError: the data is not a message, or is too long.
    """
    try:
        message: AnyMessage = _decoder.decode(framing.receive(sock.recv_into, most))
    except (framing.FrameTooLongError, msgspec.DecodeError) as error:
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
