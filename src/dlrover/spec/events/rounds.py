"""Rendezvous rounds, and the node checks before them."""

from __future__ import annotations

import msgspec

from dlrover.spec.check import CheckFinding, FindingKind
from dlrover.spec.words import counted


class RoundOpened(msgspec.Struct, frozen=True, tag="round_opened"):
    """The master called nodes to a new rendezvous round."""

    round: int
    reason: str
    awaited: int

    def sentence(self) -> str:
        """Return the event as one sentence."""
        verb = "is" if self.awaited == 1 else "are"
        return f"Round {self.round} opened ({self.reason}); {counted(self.awaited, 'node')} {verb} awaited."


class RoundCompleted(msgspec.Struct, frozen=True, tag="round_completed"):
    """A world was formed."""

    round: int
    nodes: int
    world_size: int
    seconds: float
    servers: int = 0
    """Number of its processes that are servers."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        servers = f", {counted(self.servers, 'server')}" * bool(self.servers)
        return (
            f"Round {self.round} is complete after {self.seconds:.2f} s: "
            f"{counted(self.nodes, 'node')}, {counted(self.world_size - self.servers, 'worker')}{servers}."
        )


class NodeCheckStarted(msgspec.Struct, frozen=True, tag="node_check_started"):
    """Nodes are being checked before they join a world."""

    nodes: int
    reason: str

    def sentence(self) -> str:
        """Return the event as one sentence."""
        count = "1 node is" if self.nodes == 1 else f"{self.nodes} nodes are"
        return f"{count} being checked: {self.reason}."


class NodeCheckFinding(CheckFinding, frozen=True, tag="node_check_finding"):
    """The node check found something."""

    excluded: tuple[int, ...] = ()
    """Those of the nodes that the job goes on without."""

    def sentence(self) -> str:
        """Return the event as one sentence."""
        named = ", ".join(map(str, self.nodes[:NODES_NAMED]))
        more = "..." if len(self.nodes) > NODES_NAMED else ""
        who = f"node{'s' if len(self.nodes) > 1 else ''} {named}{more}"
        kind = "" if self.kind is FindingKind.NOTE else f" ({self.kind.value})"
        rest = "; the job goes on without it" if self.excluded else ""
        if len(self.excluded) > 1 or (self.excluded and len(self.nodes) > 1):
            rest = f"; the job goes on without {', '.join(map(str, self.excluded))}"
        return f"Node check, {who}: {self.component.value}{kind}: {self.message}{rest}."


NODES_NAMED = 8
"""Maximum number of nodes that a sentence names."""


class NodeCheckFinished(msgspec.Struct, frozen=True, tag="node_check_finished"):
    """The node check is over."""

    nodes: int
    excluded: int
    rounds: int
    seconds: float

    def sentence(self) -> str:
        """Return the event as one sentence."""
        return (
            f"The node check took {self.seconds:.2f} s in {counted(self.rounds, 'round')}: "
            f"{self.nodes - self.excluded} of {self.nodes} nodes go on."
        )
