"""Nodes: their life cycle, spares, migration and memory."""

from __future__ import annotations

import msgspec

from dlrover.spec.node import SERVER
from dlrover.spec.words import counted, size


class NodeLaunched(msgspec.Struct, frozen=True, tag="node_launched"):
    """The platform starts a node."""

    node: int
    replaces: int = -1
    cpu_factor: float = 1.0
    """Cores of the node as a multiple of the job's request."""
    memory_factor: float = 1.0
    """Memory of the node as a multiple of the job's request."""
    role: str = ""
    """``worker`` or ``ps``; empty in a job without servers."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        replaced = f" in place of node {self.replaces}" if self.replaces >= 0 else ""
        sizes = (("cores", self.cpu_factor), ("memory", self.memory_factor))
        other = [f"{factor:.3g} times the {what}" for what, factor in sizes if factor != 1.0]
        size = f" with {' and '.join(other)} that the job requested" if other else ""
        return f"{_node(self.node, self.role)} is being started{replaced}{size}."


class NodeWaits(msgspec.Struct, frozen=True, tag="node_waits"):
    """A node cannot be started yet; without a reason, as the platform reports it: nothing hinders it any more."""

    node: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Node {self.node} is not started yet: {self.reason}."


class NodeConnected(msgspec.Struct, frozen=True, tag="node_connected"):
    """An agent connected for the first time."""

    node: int
    hostname: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Node {self.node} connected from {self.hostname}."


class NodeSucceeded(msgspec.Struct, frozen=True, tag="node_succeeded"):
    """All workers of a node ended with exit code 0."""

    node: int
    role: str = ""
    """``worker`` or ``ps``; empty in a job without servers."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        if self.role == SERVER:
            return f"The server of node {self.node} ended by itself, with exit code 0."
        return f"All workers of node {self.node} succeeded."


class NodeLost(msgspec.Struct, frozen=True, tag="node_lost"):
    """A node is permanently gone."""

    node: int
    reason: str
    role: str = ""
    """``worker`` or ``ps``; empty in a job without servers."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"{_node(self.node, self.role)} is lost: {self.reason}."


class NodeReleased(msgspec.Struct, frozen=True, tag="node_released"):
    """A node that the job no longer needs has left."""

    node: int
    reason: str
    """How the node ended."""
    role: str = ""
    """``worker`` or ``ps``; empty in a job without servers."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"{_node(self.node, self.role)} is released: {self.reason}."


class SparesDecided(msgspec.Struct, frozen=True, tag="spares_decided"):
    """The number of spares changes, since the failure rate or the time to replace a node has (``--spares auto``)."""

    before: int
    spares: int
    nodes: int
    """Nodes of the job."""
    rate: float
    """Failures per node and day."""
    seconds: float
    """Seconds from the order of a node to its readiness."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"The job will have {counted(self.spares, 'spare')}, not {self.before}: {self.rate:.2g} failures per "
            f"node and day, and {self.seconds:.0f} s to replace one of {counted(self.nodes, 'node')}."
        )


class SpareReady(msgspec.Struct, frozen=True, tag="spare_ready"):
    """A node is ready to take the place of a lost one."""

    node: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Node {self.node} is a spare: it is ready to take the place of a lost node."


class SpareTakesPlace(msgspec.Struct, frozen=True, tag="spare_takes_place"):
    """A spare becomes a node of the world in place of a lost one."""

    node: int
    lost: int
    """The lost node; -1 if the world did not have all its nodes before."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        place = f"the place of node {self.lost}" if self.lost >= 0 else "a free place"
        return f"Spare node {self.node} takes {place}."


class NodeMigrates(msgspec.Struct, frozen=True, tag="node_migrates"):
    """A node trains on until another one takes its place."""

    node: int
    successor: int
    """The node that takes its place."""
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return f"Node {self.node} trains on until node {self.successor} takes its place: {self.reason}."


class MigrationEnded(msgspec.Struct, frozen=True, tag="migration_ended"):
    """A node stays because the node that should take its place is gone."""

    node: int
    successor: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"Node {self.node} stays: node {self.successor} does not take its place: {self.reason}."
        )


class MemoryGrows(msgspec.Struct, frozen=True, tag="memory_grows"):
    """A node's memory use grows and is expected to exceed the node's memory."""

    node: int
    needed: int
    """Bytes that the node is expected to need."""
    limit: int
    """Bytes that the node has."""
    seconds: float
    """Time until then, at most."""
    ordered: bool = False
    """True if another node with more memory takes its place before that."""
    given: int = 0
    """Bytes of the other node; 0 if unknown."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        more = size(self.given) if self.given else "more"
        then = f"; a node with {more} takes its place" if self.ordered else ""
        return f"Node {self.node} is {self.need()}{then}."

    def need(self) -> str:
        """Return the forecast as the end of a sentence."""
        long = self.seconds >= 2 * MINUTE
        soon = f"{self.seconds / MINUTE:.0f} min" if long else f"{self.seconds:.0f} s"
        return f"expected to need {size(self.needed)} of memory within {soon}, and has {size(self.limit)}"


MINUTE = 60.0
"""Seconds per minute."""


class MemoryBound(msgspec.Struct, frozen=True, tag="memory_bound"):
    """A node needs more memory than the platform can give it."""

    node: int
    factor: float
    """Memory of the node as a multiple of the job's request."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        has = f", {self.factor:.3g} times the requested amount" if self.factor != 1.0 else ""
        return f"Node {self.node} has all the memory that it can be given{has}: it gets no more."


def _node(number: int, role: str) -> str:
    return f"Node {number} ({role})" if role else f"Node {number}"
