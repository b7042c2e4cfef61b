"""The life cycle of a node: one agent and its workers."""

from __future__ import annotations

import enum

import msgspec


class NodeSize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each node gets of the machine that it shares with others."""

    memory: int = 0
    """Bytes; 0: no limit."""
    cpu: float = 0.0
    """Cores; 0: no limit."""

    def times(self, memory: float, cpu: float) -> NodeSize:
        """The size of a node that has so many times as much."""
        return NodeSize(memory=round(self.memory * memory), cpu=self.cpu * cpu)

    def __bool__(self) -> bool:
        return bool(self.memory or self.cpu)


class LaunchNode(msgspec.Struct, frozen=True):
    """What a platform is to start a node with."""

    node_id: int
    node_rank: int
    """The rank that the node is to wish for."""
    avoid: tuple[str, ...] = ()
    """Names of the hosts that it should not be on."""
    memory_factor: float = 1.0
    """How many times the memory that the job asked for it gets."""
    cpu_factor: float = 1.0
    """The same of its cores."""


class FoundNode(msgspec.Struct, frozen=True):
    """A node that runs, as its platform knows it."""

    node_id: int
    node_rank: int
    handle: str
    """By which any master finds it again."""
    memory_factor: float = 1.0
    """How many times the memory that the job asked for it has."""
    cpu_factor: float = 1.0
    """The same of its cores."""


class NodeStatus(str, enum.Enum):
    """Where a node stands. The value is what users see."""

    PENDING = "pending"
    """Asked of the platform; its agent has not connected yet."""
    READY = "ready"
    """Its agent is connected and runs no workers: it waits for a round."""
    RUNNING = "running"
    """Its workers belong to the current world."""
    SUCCEEDED = "succeeded"
    """All of its workers ended with exit code 0."""
    LOST = "lost"
    """Its agent ended, or was silent for too long. Final: what returns is a new node."""
    RELEASED = "released"
    """It left because the job ended, or goes on with fewer nodes. Final."""

    @property
    def final(self) -> bool:
        """Whether no transition leads out of this status."""
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
