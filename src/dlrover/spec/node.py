"""Life cycle of a node: one agent and its workers."""

from __future__ import annotations

import enum

import msgspec


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
