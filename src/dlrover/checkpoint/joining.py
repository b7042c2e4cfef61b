"""How the ranks of a world find each other's savers when they begin."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dlrover import config
from dlrover.checkpoint import certificates
from dlrover.checkpoint.client import SaverClient
from dlrover.checkpoint.formats import FORMAT
from dlrover.checkpoint.placement import holders
from dlrover.checkpoint.protocol import Attached, Join, Peer, Replication
from dlrover.checkpoint.saves import Newest, Numbering
from dlrover.checkpoint.world import World
from dlrover.errors import ConfigurationError, InfrastructureError

logger = logging.getLogger(__name__)

_ELSEWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737), to learn which address of this one leads to others."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DISCARD = 9
"""A port; nothing is sent to it."""


@dataclass(frozen=True)
class Wishes:
    """What is to become of steps in memory beside this node.

    Raises:
        ConfigurationError: a value is wrong.
    """

    save_at_breakpoint: bool = False
    """Whether the newest step is stored when a worker ends without `Goodbye`."""
    replicas: int = 0
    """Other nodes that get a copy."""
    bandwidth: float | None = None
    """Bytes per second that a node sends to others; None: as many as it can."""

    def __post_init__(self) -> None:
        if self.replicas < 0:
            raise ConfigurationError(f"replicas is {self.replicas}; it must be 0 or more.")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ConfigurationError(
                f"replica_bandwidth is {self.bandwidth}; it must be more than 0 bytes per second."
            )


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What every version can read of `_Facts`."""

    format: int


class _Facts(msgspec.Struct, frozen=True, array_like=True):
    """What each rank tells the others."""

    format: int
    saver: int
    session: int
    token: bytes
    newest: Newest
    """Of all saves that its node has seen; rank 0's: of those that are stored, too."""
    peer: Peer | None
    """Where its node takes replicas; None: nowhere."""
    seal: bytes = b""
    """Proves that a node of this job has said so; empty where the job uses no TLS."""


@dataclass(frozen=True)
class _Taker:
    """How this rank's node takes replicas."""

    peer: Peer | None = None
    pem: str = ""


def join(
    world: World,
    client: SaverClient,
    attached: Attached,
    stored: Newest,
    wishes: Wishes,
    env: Mapping[str, str],
) -> tuple[Join, Numbering]:
    """Agree on a session and join it; what was agreed on, and the numbers of its saves. Collective.

    Args:
        world: the ranks.
        client: this rank's connection.
        attached: what the saver at its other end says of itself.
        stored: the newest save that rank 0 finds stored.
        wishes: what the user asked for; the same on all ranks.
        env: the environment, which says where the others are.

    Raises:
        ConfigurationError: a node cannot take replicas as the user wants it, or ranks run other versions of DLRover.
        InfrastructureError: the saver refuses, or another does not belong to this job.
    """
    secret = env.get(config.REPLICA_SECRET, "") if wishes.replicas else ""
    listens = wishes.replicas and world.size > 1
    taker = world.agree(lambda: _listen(client, env, secret) if listens else _Taker())
    saver = attached.saver
    newest = attached.newest.including(stored)
    mine = _Facts(
        FORMAT, saver, secrets.randbits(63), secrets.token_bytes(32), newest, taker.peer,
        _seal(secret, taker.peer),
    )  # fmt: skip
    told = world.gather(msgspec.msgpack.encode(mine))
    _refuse_other_formats(told)
    every = [msgspec.msgpack.decode(data, type=_Facts) for data in told]
    if wishes.replicas:
        world.agree(lambda: _check(every, secret))
    joined = Join(
        session=every[0].session,
        world_size=world.size,
        ranks=tuple(rank for rank, facts in enumerate(every) if facts.saver == saver),
        save_at_breakpoint=wishes.save_at_breakpoint,
        replication=_replication(every, wishes, saver, taker.pem, secret),
    )
    if wishes.replicas and joined.replication is None and joined.ranks[0] == world.rank:
        logger.warning("No replicas are kept: there is no other node, or none can reach this one")
    world.agree(lambda: client.join(joined))
    newest = newest.including(*(facts.newest for facts in every))
    return joined, Numbering(joined.session, newest)


def _refuse_other_formats(told: Sequence[bytes]) -> None:
    """Refuse ranks that run other versions of DLRover, on every rank alike."""
    found = [msgspec.msgpack.decode(data, type=_Head).format for data in told]
    other = next((rank for rank, number in enumerate(found) if number != found[0]), 0)
    if other:
        raise ConfigurationError(
            f"Rank {other} runs another version of DLRover than rank 0: its checkpoints have format {found[other]},"
            f" those of rank 0 have format {found[0]}; install the same version on all nodes."
        )


def _check(every: Sequence[_Facts], secret: str) -> None:
    """Refuse savers whose traffic would not be as safe as the job's other connections."""
    for rank, facts in enumerate(every):
        if not hmac.compare_digest(facts.seal, _seal(secret, facts.peer)):
            raise InfrastructureError(
                f"No replicas are kept, because the saver of rank {rank} cannot be shown to belong to this job:"
                " with TLS, all ranks must be started by the agents of one job (dlrover-run with tls_ca)."
            )


def _seal(secret: str, peer: Peer | None) -> bytes:
    """What only a node of this job can say of where replicas are taken; empty without TLS."""
    if not secret or peer is None:
        return b""
    return hmac.digest(secret.encode(), msgspec.msgpack.encode(peer), "sha256")


def _replication(
    every: Sequence[_Facts], wishes: Wishes, saver: int, pem: str, secret: str
) -> Replication | None:
    """Nodes are numbered by their lowest rank."""
    if not wishes.replicas:
        return None
    nodes = {facts.saver: facts.peer for facts in reversed(every)}
    order = list(dict.fromkeys(facts.saver for facts in every))
    own = nodes[saver]
    if own is None or len(order) < 2:
        return None
    others = holders(order.index(saver), len(order), 1 + wishes.replicas)
    peers = [nodes[order[other]] for other in others]
    token = secret.encode() or every[0].token  # which all who see the workers' traffic can read
    return Replication(token, own, tuple(filter(None, peers)), wishes.bandwidth, pem)


def _listen(client: SaverClient, env: Mapping[str, str], secret: str) -> _Taker:
    host = _own_address(env.get("MASTER_ADDR", ""))
    try:
        listening = client.listen(host, tls=bool(secret))
    except InfrastructureError as error:
        logger.warning("No replicas are taken on %s: %s", host, error)
        return _Taker()
    fingerprint = certificates.fingerprint(listening.pem) if listening.pem else b""
    return _Taker(Peer(host, listening.port, fingerprint), listening.pem)


def _own_address(other: str) -> str:
    """The address of this machine that another one sees; of the loopback only if that one does."""
    for target in (other, socket.gethostname(), _ELSEWHERE):
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(target, _DISCARD, type=socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], found[1]) as sock:
                sock.connect(found[4])
                address = str(sock.getsockname()[0])
            if other in _LOOPBACK or not ipaddress.ip_address(address).is_loopback:
                return address
    return _LOOPBACK[0]
