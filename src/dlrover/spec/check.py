"""Messages of the node check: what a node measures, and what it found."""

from __future__ import annotations

import enum

import msgspec


class Component(str, enum.Enum):
    """Part of a node. Users see the value."""

    DEVICE = "device"
    """An accelerator, or the processors if there is none."""
    MEMORY = "memory"
    """Memory of the host or of an accelerator."""
    DISK = "disk"
    CLOCK = "clock"
    NETWORK = "network"
    """The path to another node."""
    AGENT = "agent"
    """The node as a whole: it does not answer."""


class ProbeState(str, enum.Enum):
    """Result of one probe. Users see the value."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "not checked"


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Finding of one probe of a node."""

    component: Component
    name: str = ""
    """Which of several parts, such as ``cuda:3``; for the network, the other node's number."""
    state: ProbeState = ProbeState.OK
    figure: float = 0.0
    """Measured rate or time; 0 if nothing was measured."""
    unit: str = ""
    """Unit of ``figure``: ``GFLOP/s``, ``GB/s`` and ``MB/s`` (more is better), ``ms`` (less is better)."""
    message: str = ""
    """Why the probe failed or was skipped; otherwise empty."""

    @property
    def slowness(self) -> float:
        """A number that is larger for slower components; 0.0 if nothing was measured."""
        if self.state is not ProbeState.OK or self.figure <= 0:
            return 0.0
        return self.figure if self.unit == "ms" else 1 / self.figure


class FindingKind(str, enum.Enum):
    """Meaning of a finding for its nodes."""

    FAULT = "fault"
    SLOW = "slow"
    LINK = "link"
    """Two nodes work, but not with each other."""
    UNDETERMINED = "undetermined"
    """At least one of the nodes is at fault; the evidence does not show which."""
    UNTESTED = "untested"
    """The node met no node that is known to be sound."""
    NOTE = "note"
    """Worth knowing, but no reason to exclude a node."""


class CheckFinding(msgspec.Struct, frozen=True):
    """One result of a check."""

    kind: FindingKind
    nodes: tuple[int, ...]
    component: Component
    message: str


class CheckOrder(msgspec.Struct, frozen=True, kw_only=True, tag="check_order"):
    """Order to a node to check itself, and its network to the other members of its group."""

    check: int
    """Number of the check; 1 for a job's first."""
    round: int
    """Number of the round within the check, from 1."""
    seconds: float
    """Maximum duration of the node's check."""
    local: bool
    """True: also check the node's own parts, not only the network."""
    members: tuple[int, ...]
    """Node ids of the group, including the ordered node; a group of one checks no network."""
    store_addr: str = ""
    store_port: int = 0
    """With ``store_addr``: where the first member opens the group's store."""
    sent_at: float = 0.0
    """The master's clock, seconds since the epoch."""


class CheckReport(msgspec.Struct, frozen=True, kw_only=True, tag="check_report"):
    """A node's answer to a `CheckOrder`."""

    check: int
    round: int
    results: tuple[ProbeResult, ...]
    received_at: float = 0.0
    """The node's clock when the order arrived, seconds since the epoch."""
    sent_at: float = 0.0
    """The node's clock when the report left, seconds since the epoch."""

    def bounded(self) -> CheckReport:
        """Return a copy with texts cut to their limits and at most `RESULTS_LIMIT` results."""
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
"""Results in one report; no node has that many parts."""
