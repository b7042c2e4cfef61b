"""How the ranks of a world find each other's savers when they begin."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dlrover.checkpoint.client import SaverClient
from dlrover.checkpoint.placement import holders
from dlrover.checkpoint.protocol import Join, Peer, Replication
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


class _Facts(msgspec.Struct, frozen=True, array_like=True):
    """What each rank tells the others."""

    saver: int
    session: int
    token: bytes
    peer: Peer | None
    """Where its node takes replicas; None: nowhere."""


def join(
    world: World, client: SaverClient, saver: int, wishes: Wishes, env: Mapping[str, str]
) -> Join:
    """Agree on a session and join it; what was agreed on. Collective.

    Args:
        world: the ranks.
        client: this rank's connection.
        saver: the name of the saver at its other end.
        wishes: what the user asked for; the same on all ranks.
        env: the environment, which says where the others are.

    Raises:
        InfrastructureError: the saver refuses.
    """
    peer = _listen(client, env) if wishes.replicas and world.size > 1 else None
    mine = _Facts(saver, secrets.randbits(63), secrets.token_bytes(32), peer)
    every = [
        msgspec.msgpack.decode(data, type=_Facts)
        for data in world.gather(msgspec.msgpack.encode(mine))
    ]
    joined = Join(
        session=every[0].session,
        world_size=world.size,
        ranks=tuple(rank for rank, facts in enumerate(every) if facts.saver == saver),
        save_at_breakpoint=wishes.save_at_breakpoint,
        replication=_replication(saver, every, wishes) if wishes.replicas else None,
    )
    if wishes.replicas and joined.replication is None and joined.ranks[0] == world.rank:
        logger.warning("No replicas are kept: there is no other node, or none can reach this one")
    client.join(joined)
    return joined


def _replication(saver: int, every: Sequence[_Facts], wishes: Wishes) -> Replication | None:
    """Nodes are numbered by their lowest rank."""
    nodes = {facts.saver: facts.peer for facts in reversed(every)}
    order = list(dict.fromkeys(facts.saver for facts in every))
    own = nodes[saver]
    if own is None or len(order) < 2:
        return None
    others = holders(order.index(saver), len(order), 1 + wishes.replicas)
    peers = [nodes[order[other]] for other in others]
    return Replication(every[0].token, own, tuple(filter(None, peers)), wishes.bandwidth)


def _listen(client: SaverClient, env: Mapping[str, str]) -> Peer | None:
    host = _own_address(env.get("MASTER_ADDR", ""))
    try:
        return Peer(host, client.listen(host))
    except InfrastructureError as error:
        logger.warning("No replicas are taken on %s: %s", host, error)
        return None


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
