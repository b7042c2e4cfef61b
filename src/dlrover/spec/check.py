"""The node check on the wire: what a node is asked to measure, and what it found."""

from __future__ import annotations

import enum

import msgspec


class Component(str, enum.Enum):
    """A part of a node. The value is what users see."""

    DEVICE = "device"
    """An accelerator, or the processors where there is none."""
    MEMORY = "memory"
    """The host's memory, or an accelerator's."""
    DISK = "disk"
    CLOCK = "clock"
    NETWORK = "network"
    """The way to another node."""
    AGENT = "agent"
    """The node as a whole: it does not answer."""


class ProbeState(str, enum.Enum):
    """What came of one probe. The value is what users see."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "not checked"


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one probe of a node found."""

    component: Component
    name: str = ""
    """Which one of several, as ``cuda:3``; the other node's number for the network."""
    state: ProbeState = ProbeState.OK
    figure: float = 0.0
    """The measured rate or time; 0 where nothing was measured."""
    unit: str = ""
    """Of ``figure``: ``GFLOP/s``, ``GB/s`` and ``MB/s`` (more is better), ``ms`` (less is better)."""
    message: str = ""
    """Why it failed or was not done; empty otherwise."""

    @property
    def slowness(self) -> float:
        """A number that grows the slower the component is; 0.0 where nothing was measured."""
        if self.state is not ProbeState.OK or self.figure <= 0:
            return 0.0
        return self.figure if self.unit == "ms" else 1 / self.figure


class CheckOrder(msgspec.Struct, frozen=True, kw_only=True, tag="check_order"):
    """Ask a node to check itself, and the network to the other members of its group."""

    check: int
    """Number of the check; 1 for a job's first."""
    round: int
    """1 for the check's first round."""
    seconds: float
    """How long the node may take."""
    local: bool
    """Check the node's own parts too, not the network alone."""
    members: tuple[int, ...]
    """Node ids of the group, the ordered node included; a node alone checks no network."""
    store_addr: str = ""
    store_port: int = 0
    """Where the first member opens the group's store."""
    sent_at: float = 0.0
    """The master's clock, seconds since the epoch."""


class CheckReport(msgspec.Struct, frozen=True, kw_only=True, tag="check_report"):
    """A node's answer to a `CheckOrder`."""

    check: int
    round: int
    results: tuple[ProbeResult, ...]
    received_at: float = 0.0
    """The node's clock when the order came, seconds since the epoch."""
    sent_at: float = 0.0
    """The same when the report left."""

    def bounded(self) -> CheckReport:
        """The same with each text cut to `MESSAGE_LIMIT` and at most `RESULTS_LIMIT` results."""
        results = tuple(
            msgspec.structs.replace(
                result, name=result.name[:NAME_LIMIT], message=result.message[:MESSAGE_LIMIT]
            )
            for result in self.results[:RESULTS_LIMIT]
        )
        return msgspec.structs.replace(self, results=results)


MESSAGE_LIMIT = 400
"""Characters of one result's message."""
NAME_LIMIT = 40
"""Characters of a component's name."""
RESULTS_LIMIT = 64
"""Results in one report: a node has fewer parts than that."""
