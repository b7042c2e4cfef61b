"""Nodes: one agent and its workers each; their roles and their life cycle.

Workers have wanted ranks from 0, servers (role ``ps``, parameter servers) those from `FIRST_SERVER`, so that
a world lists its workers first. A spare belongs to no world and has a wanted rank from `FIRST_SPARE`, until it
gets that of a lost worker.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from dlrover.spec.words import counted

WORKER = "worker"
SERVER = "ps"
CHIEF = "chief"
EVALUATOR = "evaluator"
SPARE = "spare"
FIRST_SPARE = 1 << 19
"""Wanted rank of the first spare; the wanted ranks of all workers are lower."""
FIRST_SERVER = 1 << 20
"""Wanted rank of the first server; the wanted ranks of all workers and spares are lower."""


def is_spare(node_rank: int) -> bool:
    """Return whether a node with this wanted rank is a spare."""
    return FIRST_SPARE <= node_rank < FIRST_SERVER


def is_server(node_rank: int) -> bool:
    """Return whether a node with this wanted rank is a server."""
    return node_rank >= FIRST_SERVER


def role_of(node_rank: int) -> str:
    """Return the role of a node with this wanted rank: `WORKER` or `SERVER`."""
    return SERVER if is_server(node_rank) else WORKER


def index_in_role(node_rank: int) -> int:
    """Return a node's index among the wanted nodes of its role, or among the spares, from 0."""
    if is_spare(node_rank):
        return node_rank - FIRST_SPARE
    return node_rank - FIRST_SERVER if is_server(node_rank) else node_rank


class Size(NamedTuple):
    """Number of nodes by role, of an actual or a possible world."""

    workers: int
    """Nodes that are not servers."""
    servers: int = 0

    @property
    def nodes(self) -> int:
        """Total number of nodes."""
        return self.workers + self.servers

    def in_words(self) -> str:
        """Return ``2 nodes``; with servers, ``2 workers and 1 server``."""
        return self.by_role() if self.servers else counted(self.workers, "node")

    def by_role(self) -> str:
        """Return ``2 workers and 0 servers``."""
        return f"{counted(self.workers, 'worker')} and {counted(self.servers, 'server')}"

    def change_to(self, size: Size) -> str:
        """Return ``1 -> 2 nodes``; with servers, the changes of both roles."""
        if not size.servers:
            return f"{self.workers} -> {size.workers} nodes"
        pairs = zip(("workers", "servers"), self, size, strict=True)
        return ", ".join(f"{old} -> {new} {role}" for role, old, new in pairs if old != new)


class NodeLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each node's share of a machine that several nodes share."""

    memory: int = 0
    """Bytes; 0: no limit."""
    cpu: float = 0.0
    """Cores; 0: no limit."""

    def times(self, memory: float, cpu: float) -> NodeLimits:
        """Return the size scaled by these factors."""
        return NodeLimits(memory=round(self.memory * memory), cpu=self.cpu * cpu)

    def __bool__(self) -> bool:
        return bool(self.memory or self.cpu)


class LaunchNode(msgspec.Struct, frozen=True):
    """Launch request for a node, as its platform gets it."""

    node_id: int
    node_rank: int
    """Rank that the node requests."""
    avoid: tuple[str, ...] = ()
    """Names of hosts that the node should not run on."""
    memory_factor: float = 1.0
    """Memory of the node as a multiple of the job's request."""
    cpu_factor: float = 1.0
    """Cores of the node as a multiple of the job's request."""


class FoundNode(msgspec.Struct, frozen=True):
    """A running node, as its platform knows it."""

    node_id: int
    node_rank: int
    handle: str
    """Handle by which any master finds the node again."""
    memory_factor: float = 1.0
    """Memory of the node as a multiple of the job's request."""
    cpu_factor: float = 1.0
    """Cores of the node as a multiple of the job's request."""


class NodeStatus(str, enum.Enum):
    """Status of a node. Users see the value."""

    PENDING = "pending"
    """Requested from the platform; its agent has not connected yet."""
    READY = "ready"
    """Its agent is connected and runs no workers; the node waits for a round."""
    RUNNING = "running"
    """Its workers belong to the current world."""
    SUCCEEDED = "succeeded"
    """All of its workers ended with exit code 0."""
    LOST = "lost"
    """Its agent ended, or was silent for too long. Final: a returning agent is a new node."""
    RELEASED = "released"
    """It left because the job ended or goes on with fewer nodes. Final."""

    @property
    def final(self) -> bool:
        """True if no transition leads out of this status."""
        return not TRANSITIONS[self]


TRANSITIONS: dict[NodeStatus, frozenset[NodeStatus]] = {
    NodeStatus.PENDING: frozenset({NodeStatus.READY, NodeStatus.LOST, NodeStatus.RELEASED}),
    NodeStatus.READY: frozenset({NodeStatus.RUNNING, NodeStatus.LOST, NodeStatus.RELEASED}),
    NodeStatus.RUNNING: frozenset(
        {NodeStatus.READY, NodeStatus.SUCCEEDED, NodeStatus.LOST, NodeStatus.RELEASED}
    ),
    NodeStatus.SUCCEEDED: frozenset({NodeStatus.READY, NodeStatus.LOST, NodeStatus.RELEASED}),
    NodeStatus.LOST: frozenset(),
    NodeStatus.RELEASED: frozenset(),
}
"""Every allowed change of status; any other is a defect and raises."""
