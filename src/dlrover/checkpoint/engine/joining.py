"""The start of a world: its ranks agree on a session and find each other's savers."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dlrover import config
from dlrover._util import decoding
from dlrover._util.sockets import address_towards
from dlrover.checkpoint.engine.client import SaverClient
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.machine.saves import Newest, Numbering
from dlrover.checkpoint.saver import certificates
from dlrover.checkpoint.saver.protocol import (
    Attached,
    EndedWorker,
    JoinSaver,
    Peer,
    Replication,
)
from dlrover.checkpoint.storage.formats import FORMAT
from dlrover.errors import ConfigurationError, InfrastructureError

logger = logging.getLogger(__name__)

_ELSEWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737), used to find this machine's outward address."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DISCARD = 9
"""A port; nothing is sent to it."""


@dataclass(frozen=True)
class Wishes:
    """The user's options to protect steps in memory from the loss of workers and nodes.

    Raises:
        ConfigurationError: a value is wrong.
    """

    save_at_breakpoint: bool = False
    """True to store the newest step when a worker ends without `Goodbye`."""
    replicas: int = 0
    """The number of other nodes that get a copy."""
    bandwidth: float | None = None
    """Bytes per second that a node sends to others; None: unlimited."""

    def __post_init__(self) -> None:
        if self.replicas < 0:
            raise ConfigurationError(f"replicas is {self.replicas}; it must be 0 or more.")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ConfigurationError(
                f"replica_bandwidth is {self.bandwidth}; it must be more than 0 bytes per second."
            )


class _AnyFormat(msgspec.Struct, frozen=True, array_like=True):
    """The part of `_Facts` that every version can read."""

    format: int


class _Facts(msgspec.Struct, frozen=True, array_like=True):
    """Facts that each rank announces to the others."""

    format: int
    saver: int
    session: int
    token: bytes
    newest: Newest
    """The newest of all saves that the rank's node has seen; rank 0 includes the stored ones."""
    peer: Peer | None
    """Address at which the rank's node accepts replicas; None if it accepts none."""
    ended: EndedWorker | None = None
    """The rank's last worker in an earlier world."""
    seal: bytes = b""
    """Proof that ``peer`` comes from a node of this job; empty if the job uses no TLS."""


@dataclass(frozen=True)
class _Taker:
    """Address and certificate with which this rank's node accepts replicas."""

    peer: Peer | None = None
    pem: str = ""


def join(
    world: TorchWorld,
    client: SaverClient,
    attached: Attached,
    stored: Newest,
    wishes: Wishes,
    env: Mapping[str, str],
) -> tuple[JoinSaver, Numbering]:
    """Agree on a session and join it; return the session and the numbering of its saves. Collective.

    Args:
        world: the ranks.
        client: this rank's connection.
        attached: the saver's reply to `attach`.
        stored: the newest save that rank 0 finds in storage.
        wishes: the user's options; the same on all ranks.
        env: the environment, which says where the other ranks are.

    Raises:
        ConfigurationError: a node cannot accept the replicas, or ranks run different versions of DLRover.
        InfrastructureError: the saver refuses, or another saver does not belong to this job.
    """
    secret = env.get(config.REPLICA_SECRET, "") if wishes.replicas else ""
    listens = wishes.replicas and world.size > 1
    taker = world.agree(lambda: _listen(client, env, secret) if listens else _Taker())
    saver = attached.saver
    newest = attached.newest.including(stored)
    mine = _Facts(
        FORMAT, saver, secrets.randbits(63), secrets.token_bytes(32), newest, taker.peer, attached.ended,
        _seal(secret, taker.peer),
    )  # fmt: skip
    gathered = world.gather(msgspec.msgpack.encode(mine))
    _refuse_other_formats(gathered)
    every = [decoding.msgpack(data, _Facts) for data in gathered]
    if wishes.replicas:
        world.agree(lambda: _check(every, secret))
    joined = JoinSaver(
        session=every[0].session,
        world_size=world.size,
        ranks=tuple(rank for rank, facts in enumerate(every) if facts.saver == saver),
        save_at_breakpoint=wishes.save_at_breakpoint,
        replication=_replication(every, wishes, saver, taker.pem, secret),
        ended=_first_to_end(facts.ended for facts in every if facts.ended is not None),
    )
    if wishes.replicas and joined.replication is None and joined.ranks[0] == world.rank:
        logger.warning("No replicas are kept: there is no other node, or none can reach this one")
    world.agree(lambda: client.join(joined))
    newest = newest.including(*(facts.newest for facts in every))
    return joined, Numbering(joined.session, newest)


def _first_to_end(workers: Iterable[EndedWorker]) -> tuple[EndedWorker, ...]:
    """Return the worker of each earlier world that has made the fewest of its saves."""
    least: dict[int, EndedWorker] = {}
    for worker in workers:
        known = least.setdefault(worker.session, worker)
        least[worker.session] = min(known, worker, key=lambda one: one.number)
    return tuple(least.values())


def _refuse_other_formats(gathered: Sequence[bytes]) -> None:
    """Refuse ranks that run different versions of DLRover, on every rank alike."""
    found = [decoding.msgpack(data, _AnyFormat).format for data in gathered]
    other = next((rank for rank, number in enumerate(found) if number != found[0]), 0)
    if other:
        raise ConfigurationError(
            f"Rank {other} runs another version of DLRover than rank 0: its checkpoints have format {found[other]},"
            f" those of rank 0 have format {found[0]}; install the same version on all nodes."
        )


def _check(every: Sequence[_Facts], secret: str) -> None:
    """Refuse savers whose traffic would be less secure than the job's other connections."""
    for rank, facts in enumerate(every):
        if not hmac.compare_digest(facts.seal, _seal(secret, facts.peer)):
            raise InfrastructureError(
                f"No replicas are kept, because the saver of rank {rank} cannot be shown to belong to this job:"
                " with TLS, all ranks must be started by the agents of one job (dlrover-run with tls_ca)."
            )


def _seal(secret: str, peer: Peer | None) -> bytes:
    """Return proof that ``peer`` comes from a node of this job; empty without TLS."""
    if not secret or peer is None:
        return b""
    return hmac.digest(secret.encode(), msgspec.msgpack.encode(peer), "sha256")


def _replication(
    every: Sequence[_Facts], wishes: Wishes, saver: int, pem: str, secret: str
) -> Replication | None:
    """Return which nodes get this node's replicas; nodes are numbered by their lowest rank."""
    if not wishes.replicas:
        return None
    nodes = {facts.saver: facts.peer for facts in reversed(every)}
    order = list(dict.fromkeys(facts.saver for facts in every))
    own = nodes[saver]
    if own is None or len(order) < 2:
        return None
    others = holders(order.index(saver), len(order), 1 + wishes.replicas)
    peers = [nodes[order[other]] for other in others]
    token = secret.encode() or every[0].token  # readable by anyone who sees the workers' traffic
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
    """Return this machine's address as ``other`` sees it; loopback only if ``other`` is local."""
    for target in (other, socket.gethostname(), _ELSEWHERE):
        with contextlib.suppress(OSError):
            address = address_towards(target, _DISCARD)
            if other in _LOOPBACK or not ipaddress.ip_address(address).is_loopback:
                return address
    return _LOOPBACK[0]


def holders(node: int, nodes: int, copies: int) -> tuple[int, ...]:
    """Return the other nodes that hold copies of a node's memory, placed as in GEMINI (SOSP 2023).

    A step is lost only when all nodes of one group are lost; in a ring, every run of neighbours is a group.

    Args:
        node: the node's number, from 0.
        nodes: the number of nodes.
        copies: the number of copies of each node's memory, including its own.

    Nodes are grouped by number, ``copies`` to a group; if some are left over, they form a ring with the
    last group.
    """
    copies = max(1, min(copies, nodes))
    grouped = (nodes // copies - 1) * copies  # a ring of ``copies`` nodes is a group, too
    if node < grouped:
        first = node - node % copies
        return tuple(other for other in range(first, first + copies) if other != node)
    return tuple(grouped + n for n in ring(node - grouped, nodes - grouped, copies))


def ring(node: int, nodes: int, copies: int) -> tuple[int, ...]:
    """Return the holders in a ring, where each node's memory is copied to the nodes that follow it."""
    return tuple((node + distance) % nodes for distance in range(1, copies))
