"""Parts of a job's state: its nodes, its open incident and its phase."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from dlrover.errors import ExitCode
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.node import NodeStatus
from dlrover.spec.outcome import Outcome


class Phase(str, enum.Enum):
    """Phase of a job. Users see the value."""

    WAITING = "waiting for nodes"
    """The first round collects nodes."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """A later round collects nodes."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class Node:
    """One node of the job. Change ``status`` only through `JobMachine`."""

    id: int
    node_rank: int
    status: NodeStatus = NodeStatus.PENDING
    #: id of the agent process that last connected; another process is another node
    uid: str = ""
    hostname: str = ""
    #: handle by which the platform finds the node again; empty for nodes that come by themselves
    handle: str = ""
    #: True if the platform was asked for it; such a node is replaced when lost
    launched: bool = False
    #: True while its stream is open
    connected: bool = False
    #: True once it has been part of a world
    has_run: bool = False
    #: True if its agent ended after its workers had succeeded; it is missed only when a new round opens
    gone: bool = False
    #: True if the node check named it
    excluded: bool = False
    #: True if the platform can make neither this node nor another one in its place
    refused: bool = False
    #: exit code of its agent, if its platform knows it
    exit_code: int = 0
    #: what keeps it from starting, according to its platform
    waits: str = ""
    #: why it is lost
    reason: str = ""
    #: memory that it was launched with, as a multiple of the job's request
    memory_factor: float = 1.0
    #: cores that it was launched with, as a multiple of the job's request
    cpu_factor: float = 1.0


@dataclass
class Migration:
    """Replacement of a node by another one, which is its key in ``JobState.migrations``."""

    #: the node that is replaced; it trains until the new one takes over
    node: int
    #: when the new node is given up if it has not joined
    until: float


@dataclass
class Incident:
    """An interruption from a fault's first sign to the first new step."""

    since: float
    round: int
    failures: list[Failure] = field(default_factory=list)
    #: ids of the failures
    seen: set[str] = field(default_factory=set)
    #: time of the earliest failure that echoes no other
    earliest: float = float("inf")
    #: later failures that kept their full texts because each was earlier than ``earliest``
    later_causes: int = 0
    #: failures of the kind `FailureKind.NODE`, one for each lost node of the world
    lost_nodes: list[Failure] = field(default_factory=list)
    #: where the training hung, if a hang began the incident; otherwise empty
    hang: str = ""
    #: True once the restart policy has decided
    decided: bool = False


def phase_after(exit_code: int) -> Phase:
    """Return the phase of a job that ended with ``exit_code``."""
    if exit_code == ExitCode.SUCCESS:
        return Phase.SUCCEEDED
    stopped = exit_code == ExitCode.STOPPED or exit_code > ExitCode.SIGNAL_BASE
    return Phase.STOPPED if stopped else Phase.FAILED


def given_up(node: Node) -> Outcome:
    """Return the outcome for a node that the job has given up."""
    reason = f"node {node.id} was given up ({node.reason})."
    if node.launched:
        reason = f"node {node.id} was given up ({node.reason}) and replaced."
    return Outcome(exit_code=ExitCode.INFRASTRUCTURE, reason=reason)


def released(node: Node, *, replaced: bool = False) -> Outcome:
    """Return the outcome for a node that the job no longer needs."""
    why = "another node takes its place" if replaced else "the job goes on with fewer nodes"
    return Outcome(
        exit_code=ExitCode.SUCCESS,
        reason=f"node {node.id} was released: {why}.",
        released=True,
    )


def loss_of(node: Node, round_: int, now: float) -> Failure:
    """Return the record of a lost node, for the diagnosis."""
    return Failure(
        id=f"node {node.id}",
        kind=FailureKind.NODE,
        node_id=node.id,
        rank=-1,
        local_rank=-1,
        round=round_,
        time=now,
        message=node.reason,
        hostname=node.hostname,
    )


def excluded(node: Node, reason: str) -> Outcome:
    """Return the outcome for a node that the job excludes because of ``reason``."""
    return Outcome(
        exit_code=ExitCode.INFRASTRUCTURE, reason=f"node {node.id} is left out: {reason}."
    )
