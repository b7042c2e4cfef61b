"""What workers and the saver of their node say to each other, and over what.

A Unix socket of packets in the abstract namespace: no file to leave behind. Each packet is one message in
MessagePack; memory is handed over as file descriptors. The worker asks, the saver answers, in turn. Both
ends check that the other one runs as the same user.
"""

from __future__ import annotations

import array
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from dlrover._util.sockets import peer
from dlrover.checkpoint.formats import FORMAT
from dlrover.checkpoint.saves import Newest, SaveId
from dlrover.checkpoint.stores import is_url
from dlrover.errors import InfrastructureError, ProtocolError

MAX_PACKET = 1 << 16
GENERATIONS = 3
"""Of each rank, where there is memory for them. Two are written in turn, so that ranks that are a step apart
have one in common; the third takes part while one is being stored."""


class SaverGoneError(InfrastructureError):
    """The saver has ended."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Attach(Message, frozen=True):
    """A worker introduces itself; answered by `Attached`, with its generations' descriptors."""

    rank: int
    job: str = ""
    """The job's identifier; empty if it has none."""


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Where a saver takes replicas."""

    host: str
    port: int
    fingerprint: bytes = b""
    """Of the certificate that it shows; empty: it speaks no TLS."""


class Replication(msgspec.Struct, frozen=True, array_like=True):
    """To which savers a world's memory is copied."""

    token: bytes
    """What savers of this world know each other by."""
    own: Peer
    peers: tuple[Peer, ...]
    bandwidth: float | None
    """Bytes per second that are sent; None: as many as can be."""
    pem: str = ""
    """The saver's private key and certificate; empty: no saver of this world speaks TLS."""


class Join(Message, frozen=True):
    """The world that the worker is part of. What an earlier one had not finished asking for is dropped."""

    session: int
    world_size: int
    ranks: tuple[int, ...]
    """The ranks that share this saver."""
    save_at_breakpoint: bool = False
    """Whether what is in memory is stored when a worker ends without a `Goodbye`."""
    replication: Replication | None = None


class Listen(Message, frozen=True):
    """Take replicas at an address of this node, with port 0 at any free port; answered by `Listening`."""

    host: str
    port: int
    tls: bool = False


class Reserve(Message, frozen=True):
    """Provide ``nbytes`` of memory for one generation; answered by `Reserved` when it is there.

    It may take seconds, so it may come on a connection that is attached to no rank.
    """

    rank: int
    slot: int
    nbytes: int


class Begin(Message, frozen=True):
    """Which generation may be written? Answered by `Granted`, when one is free."""

    save: SaveId
    ready: int = GENERATIONS
    """The generations that memory is provided for; the first of the others may be named, but is not granted."""


class Publish(Message, frozen=True):
    """The generation is valid."""

    slot: int
    save: SaveId
    to_storage: bool
    metrics: dict[str, float] = {}
    """What the training measured; rank 0's counts."""


class PassOver(Message, frozen=True):
    """This rank's part of a save does not come."""

    save: SaveId
    written: bool
    """Whether the worker itself writes it to the storage."""


class Keep(Message, frozen=True):
    """The save that was chosen to continue from; None: none in memory. Others are given up."""

    save: SaveId | None


class Open(Message, frozen=True):
    """Look into the memory of another rank; answered by `Attached`, with descriptors."""

    rank: int


class Verify(Message, frozen=True):
    """Compare the tensors of a rank's generation with their checksums; answered by `Verified`."""

    rank: int
    slot: int
    below: int = 0
    """Only tensors of less than so many bytes; 0: all."""


class Wait(Message, frozen=True):
    """Answered by `Settled` when everything asked for storage by this world is durable or has failed."""


class Stored(Message, frozen=True):
    """What is the newest save of this world that was stored? Answered by `NewestStored`."""


class Goodbye(Message, frozen=True):
    """The worker is about to disconnect, and has all that it wants."""


class Look(Message, frozen=True):
    """What is valid, of any rank? Answered by `Holding`."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A valid generation."""

    rank: int
    slot: int
    save: SaveId
    world_size: int


class Attached(Message, frozen=True):
    """The saver's name for itself."""

    saver: int
    newest: Newest = Newest()
    """Of all saves that this saver has seen."""


class Reserved(Message, frozen=True):
    """How many generations there are; fewer than before where memory is short."""

    generations: int
    problem: str = ""
    """Why there is no memory for even one; the only one keeps its size."""


class Holding(Message, frozen=True):
    """All valid generations here."""

    held: tuple[Held, ...]
    unrecorded: str = ""
    """Why it is not recorded in the directory that there were whole saves; empty: it is, or there were none."""


class Listening(Message, frozen=True):
    """Where replicas are taken."""

    port: int
    pem: str = ""
    """The saver's private key and certificate, if it was asked for TLS."""


class Done(Message, frozen=True):
    """Nothing more to say."""


class Granted(Message, frozen=True):
    """The generation to write."""

    slot: int
    news: str = ""
    """What the user is to be told of the storage, once on each node."""


class Verified(Message, frozen=True):
    """Why the generation cannot be used; empty if it is whole."""

    problem: str


class Settled(Message, frozen=True):
    """What went wrong since the last time it was asked, one sentence each."""

    problems: tuple[str, ...]


class NewestStored(Message, frozen=True):
    """A save; None: none."""

    save: SaveId | None


class Refused(Message, frozen=True):
    """What was asked cannot be done."""

    reason: str
    wrong: bool = False
    """Whether it should not have been asked: the program has to be changed."""


Request = (
    Attach
    | Join
    | Listen
    | Look
    | Open
    | Reserve
    | Begin
    | Publish
    | PassOver
    | Keep
    | Verify
    | Wait
    | Stored
    | Goodbye
)
Reply = (
    Attached
    | Done
    | Reserved
    | Holding
    | Listening
    | Granted
    | Verified
    | Settled
    | NewestStored
    | Refused
)

_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def address(location: str, identity: str, node: str = "") -> str:
    """The abstract address of a node's saver for a checkpoint directory and its identity.

    ``node`` tells nodes on one machine apart: each has memory of its own, as machines have. The format is in it, too:
    a saver and workers of different versions do not meet.
    """
    text = f"{location}\0{identity}\0{node}".encode()
    return f"\0dlrover-ckpt-{FORMAT}-{os.getuid()}-{xxhash.xxh3_128_hexdigest(text)}"


def log_file(location: str) -> Path:
    """Where a saver says what it does: in its directory; for a URL, among this node's temporary files."""
    if not is_url(location):
        return Path(location) / f"saver-{socket.gethostname()}.log"
    name = f"dlrover-saver-{os.getuid()}-{xxhash.xxh3_64_hexdigest(location.encode())}.log"
    return Path(tempfile.gettempdir()) / name


def new_socket() -> socket.socket:
    """A socket of the kind that the protocol uses."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def check_peer(sock: socket.socket) -> int:
    """Refuse a peer that runs as another user. The peer's process id; 0 if it is not to be seen here.

    Raises:
        ProtocolError: it does.
    """
    pid, uid = peer(sock)
    if uid != os.getuid():
        raise ProtocolError(
            f"The peer of a checkpoint socket runs as user {uid}, not as {os.getuid()}."
        )
    return pid


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one packet."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([msgspec.msgpack.encode(message)], rights)


def receive_request(sock: socket.socket) -> Request | None:
    """The next request; None when the peer is gone.

    Raises:
        ProtocolError: it is not one.
    """
    data = sock.recv(MAX_PACKET)
    try:
        return _requests.decode(data) if data else None
    except msgspec.DecodeError as error:
        raise ProtocolError(f"A worker sent what is not a request: {error}.") from error


def receive_reply(sock: socket.socket) -> tuple[Reply, list[int]]:
    """The next reply, and the descriptors that came with it.

    Raises:
        SaverGoneError: the saver is gone.
        ProtocolError: it is not a reply, or does not fit its time.
    """
    room = socket.CMSG_SPACE(GENERATIONS * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if not data:
        raise SaverGoneError("The checkpoint saver of this node is gone.")
    cut = flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    try:
        return _replies.decode(b"" if cut else data), list(fds)
    except msgspec.DecodeError as error:
        for fd in fds:
            os.close(fd)
        raise ProtocolError(f"The checkpoint saver sent what is not a reply: {error}.") from error
