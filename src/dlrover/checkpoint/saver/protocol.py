"""Protocol between workers and the saver of their node: the messages and their transport.

The transport is a Unix packet socket in the abstract namespace, which leaves no file behind. Each packet is
one message in MessagePack; memory is handed over as file descriptors. The worker asks and the saver answers,
in turn. Both ends check that the other one runs as the same user.
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

from dlrover._util import decoding
from dlrover._util.sockets import peer
from dlrover.checkpoint.machine.saves import Newest, SaveId
from dlrover.checkpoint.storage.formats import FORMAT
from dlrover.checkpoint.storage.stores import is_url
from dlrover.errors import InfrastructureError, ProtocolError

MAX_PACKET = 1 << 16
GENERATIONS = 3
"""Generations of each rank, if memory allows. Two are written in turn, so that ranks one step apart have a
save in common; the third joins in while one is being persisted."""


class SaverGoneError(InfrastructureError):
    """Raised when the saver has ended."""


class SaverMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Attach(SaverMessage, frozen=True):
    """A worker's introduction; answered by `Attached`, with the descriptors of its generations."""

    rank: int
    job: str = ""
    """Identifier of the job; empty if it has none."""


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Address at which a saver accepts replicas of other nodes' memory."""

    host: str
    port: int
    fingerprint: bytes = b""
    """Fingerprint of the saver's certificate; empty if it does not speak TLS."""


class Replication(msgspec.Struct, frozen=True, array_like=True):
    """Plan for copying a world's memory to other savers."""

    token: bytes
    """Secret by which the savers of this world recognize each other."""
    own: Peer
    peers: tuple[Peer, ...]
    bandwidth: float | None
    """Maximum bytes sent per second; None means no limit."""
    pem: str = ""
    """The saver's private key and certificate; empty if no saver of this world speaks TLS."""


class EndedWorker(msgspec.Struct, frozen=True, array_like=True):
    """A worker of an earlier world, which saves nothing in it any more."""

    session: int
    rank: int
    number: int
    """Number of its newest save in that world; 0 if it made none."""


class JoinSaver(SaverMessage, frozen=True):
    """The worker's announcement of its world. Saves that earlier worlds have not completed are dropped."""

    session: int
    world_size: int
    ranks: tuple[int, ...]
    """The ranks that share this saver."""
    save_at_breakpoint: bool = False
    """True to persist the save in memory when a worker ends without a `Goodbye`."""
    replication: Replication | None = None
    ended: tuple[EndedWorker, ...] = ()
    """The workers, on any node, without whose parts saves of earlier worlds stay incomplete; one for each world."""


class Listen(SaverMessage, frozen=True):
    """Request to accept replicas at an address; port 0 means any free one. Answered by `Listening`."""

    host: str
    port: int
    tls: bool = False


class Reserve(SaverMessage, frozen=True):
    """Request to provide ``nbytes`` of memory for one generation; answered by `Reserved` when it is there.

    This may take seconds, so the request may come on a connection that is attached to no rank.
    """

    rank: int
    slot: int
    nbytes: int


class Begin(SaverMessage, frozen=True):
    """Request for a generation to write; answered by `Granted` when one is free."""

    save: SaveId
    ready: int = GENERATIONS
    """Number of generations that have memory. The reply may name the next one, but does not grant it."""


class Commit(SaverMessage, frozen=True):
    """Notice that a generation is valid."""

    slot: int
    save: SaveId
    to_storage: bool
    metrics: dict[str, float] = {}
    """Metrics that the training measured; those of rank 0 count."""


class PassOver(SaverMessage, frozen=True):
    """Notice that this rank's part of a save will not come."""

    save: SaveId
    written: bool
    """True if the worker itself writes the part to storage."""


class Keep(SaverMessage, frozen=True):
    """The save in memory to continue from; None means no save in memory. All others are given up."""

    save: SaveId | None


class Open(SaverMessage, frozen=True):
    """Request to read the memory of another rank; answered by `Attached`, with descriptors."""

    rank: int


class Verify(SaverMessage, frozen=True):
    """Request to compare the tensors of a generation with their checksums; answered by `Verified`."""

    rank: int
    slot: int


class Wait(SaverMessage, frozen=True):
    """Request to wait until this rank's saves to storage are durable or failed; answered by `Settled`."""


class Stored(SaverMessage, frozen=True):
    """Request for the newest stored save of this world; answered by `NewestStored`."""


class SaveNow(SaverMessage, frozen=True):
    """Request of the node's agent to store the newest save in memory; answered by `SavedNow` when that is done.

    All savers of the world get it. It may take minutes, so it comes on a connection that is attached to no rank.
    """

    request: str
    """Number of the user's request, the same for all savers; part of a file's name."""


class StoreAtEnd(SaverMessage, frozen=True):
    """Request of the node's agent to store the newest save in memory once the workers end: a node leaves on purpose.

    All savers of the world get it, on connections that are attached to no rank.
    """

    stopping: float = 0.0
    """Seconds that other nodes' workers may take to end."""
    partial: bool = False
    """True if nodes of the world are lost, and their savers with them."""


class StoredAtEnd(SaverMessage, frozen=True):
    """Request of the node's agent, after `StoreAtEnd` and the workers' end; answered by `SavedNow` when that is done.

    The problem is empty if nothing was in memory, or if it is for the saver of rank 0 to say what is stored.
    """


class Goodbye(SaverMessage, frozen=True):
    """Notice that the worker is about to disconnect in good order."""


class Look(SaverMessage, frozen=True):
    """Request for the valid generations of all ranks; answered by `ValidGenerations`."""


class HeldGeneration(msgspec.Struct, frozen=True, array_like=True):
    """A valid generation."""

    rank: int
    slot: int
    save: SaveId
    world_size: int


class Attached(SaverMessage, frozen=True):
    """Reply to `Attach` and `Open`, with the saver's identifier."""

    saver: int
    newest: Newest = Newest()
    """Greatest line and number of all saves that this saver has seen."""
    ended: EndedWorker | None = None
    """The rank's last worker before this one; None if the saver knows none."""


class Reserved(SaverMessage, frozen=True):
    """Reply with the number of generations, which falls if memory is short."""

    generations: int
    problem: str = ""
    """Reason if memory does not suffice for even one generation, which then keeps its size; else empty."""


class ValidGenerations(SaverMessage, frozen=True):
    """Reply with all valid generations of this saver."""

    held: tuple[HeldGeneration, ...]
    unrecorded: str = ""
    """Reason why the directory has no record of whole saves; empty if it has, or there were none."""


class Listening(SaverMessage, frozen=True):
    """Reply with the port at which replicas are accepted."""

    port: int
    pem: str = ""
    """The saver's private key and certificate; empty if TLS was not requested."""


class CarriedOut(SaverMessage, frozen=True):
    """Reply without content: the request was carried out."""


class Granted(SaverMessage, frozen=True):
    """Reply with the generation to write."""

    slot: int
    news: str = ""
    """Sentence about the storage for the user, sent once on each node; empty if there is none."""


class Verified(SaverMessage, frozen=True):
    """Reply with the reason why a generation cannot be used; empty if it is whole."""

    problem: str


class Settled(SaverMessage, frozen=True):
    """Reply with the world's problems since the worker's last `Wait`, one sentence each."""

    problems: tuple[str, ...]


class NewestStored(SaverMessage, frozen=True):
    """Reply with the newest stored save; None if there is none."""

    save: SaveId | None


class SavedNow(SaverMessage, frozen=True):
    """Reply with the step that is stored now; -1 and the ``problem``, one sentence, if none is."""

    step: int
    problem: str


class Refused(SaverMessage, frozen=True):
    """Reply that a request cannot be carried out."""

    reason: str
    wrong: bool = False
    """True if the request itself was wrong, so that the program must be changed."""


Request = (
    Attach
    | JoinSaver
    | Listen
    | Look
    | Open
    | Reserve
    | Begin
    | Commit
    | PassOver
    | Keep
    | Verify
    | Wait
    | Stored
    | SaveNow
    | StoreAtEnd
    | StoredAtEnd
    | Goodbye
)
Reply = (
    Attached
    | CarriedOut
    | Reserved
    | ValidGenerations
    | Listening
    | Granted
    | Verified
    | Settled
    | NewestStored
    | SavedNow
    | Refused
)

_requests = decoding.msgpack_decoder(Request)
_replies = decoding.msgpack_decoder(Reply)


def address(location: str, identity: str, node: str = "") -> str:
    """Return the abstract address of a node's saver for a checkpoint directory and its identity.

    ``node`` distinguishes nodes on one machine: each has its own memory, as separate machines do. The address
    includes the format, so a saver and workers of different versions do not connect.
    """
    text = f"{location}\0{identity}\0{node}".encode()
    return f"\0dlrover-ckpt-{FORMAT}-{os.getuid()}-{xxhash.xxh3_128_hexdigest(text)}"


def log_file(location: str) -> Path:
    """Return the log file of a saver: in its directory, or for a URL among this node's temporary files."""
    if not is_url(location):
        return Path(location) / f"saver-{socket.gethostname()}.log"
    name = f"dlrover-saver-{os.getuid()}-{xxhash.xxh3_64_hexdigest(location.encode())}.log"
    return Path(tempfile.gettempdir()) / name


def new_socket() -> socket.socket:
    """Create a socket of the type that the protocol uses."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def check_peer(sock: socket.socket) -> int:
    """Refuse a peer that runs as another user; return the peer's process id, or 0 if it is not visible here.

    Raises:
        ProtocolError: the peer runs as another user.
    """
    pid, uid = peer(sock)
    if uid != os.getuid():
        raise ProtocolError(
            f"The peer of a checkpoint socket runs as user {uid}, not as {os.getuid()}."
        )
    return pid


def send(sock: socket.socket, message: SaverMessage, fds: Sequence[int] = ()) -> None:
    """Send one packet."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([msgspec.msgpack.encode(message)], rights)


def receive_request(sock: socket.socket) -> Request | None:
    """Receive the next request; return None when the peer is gone.

    Raises:
        ProtocolError: the packet is not a request.
    """
    data = sock.recv(MAX_PACKET)
    try:
        return _requests.decode(data) if data else None
    except msgspec.DecodeError as error:
        raise ProtocolError(f"A worker sent what is not a request: {error}.") from error


def receive_reply(sock: socket.socket) -> tuple[Reply, list[int]]:
    """Receive the next reply, and the descriptors that came with it.

    Raises:
        SaverGoneError: the saver is gone.
        ProtocolError: the packet is not a reply, or was truncated.
    """
    space = socket.CMSG_SPACE(GENERATIONS * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET, space, socket.MSG_CMSG_CLOEXEC)
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
