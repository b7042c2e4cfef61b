"""The parts of a job's state: its nodes, its open incident, and where it stands."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from dlrover.errors import ExitCode
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.node import NodeStatus
from dlrover.spec.outcome import Outcome


class Phase(str, enum.Enum):
    """Where a job stands. The value is what users see."""

    WAITING = "waiting for nodes"
    """The first round is collecting."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """A later round is collecting."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class Node:
    """One node of the job. Change ``status`` only through `JobMachine`."""

    id: int
    node_rank: int
    status: NodeStatus = NodeStatus.PENDING
    #: of the agent process that last connected; a different one is a different node
    uid: str = ""
    hostname: str = ""
    #: how the platform finds the node again; empty for nodes that came by themselves
    handle: str = ""
    #: the platform was asked for it; it gets a replacement
    launched: bool = False
    #: its stream is open
    connected: bool = False
    #: whether it ever was part of a world
    has_run: bool = False
    #: its agent ended after its workers had succeeded: nothing is missing unless a new round opens
    gone: bool = False
    #: the node check named it
    excluded: bool = False
    #: its platform cannot make it, nor another one in its place
    refused: bool = False
    #: of its agent, where its platform knows it
    exit_code: int = 0
    #: what keeps it from starting, as its platform says
    waits: str = ""
    #: why it is lost
    reason: str = ""
    #: how many times the memory that the job asked for it was launched with
    memory_factor: float = 1.0
    #: the same of its cores
    cpu_factor: float = 1.0


@dataclass
class Migration:
    """A node that is to take the place of another one."""

    #: the one that trains on until then
    node: int
    #: when the new one is given up if it has not joined
    until: float


@dataclass
class Incident:
    """From a fault's first sign to the first new step."""

    since: float
    round: int
    failures: list[Failure] = field(default_factory=list)
    #: ids of the failures
    seen: set[str] = field(default_factory=set)
    #: when the earliest failure was seen that echoes no other
    earliest: float = float("inf")
    #: failures that kept their texts whole because each was earlier than that
    later_causes: int = 0
    #: of the kind `FailureKind.NODE`, one for each lost node of the world
    lost_nodes: list[Failure] = field(default_factory=list)
    #: where the training hung that began it; empty for other faults
    hang: str = ""
    #: whether the restart policy has spoken
    decided: bool = False


def phase_after(exit_code: int) -> Phase:
    """Where a job stands that ended with ``exit_code``."""
    if exit_code == ExitCode.SUCCESS:
        return Phase.SUCCEEDED
    stopped = exit_code == ExitCode.STOPPED or exit_code > ExitCode.SIGNAL_BASE
    return Phase.STOPPED if stopped else Phase.FAILED


def given_up(node: Node) -> Outcome:
    """What a node is told that the job goes on without."""
    reason = f"node {node.id} was given up ({node.reason})."
    if node.launched:
        reason = f"node {node.id} was given up ({node.reason}) and replaced."
    return Outcome(exit_code=ExitCode.INFRASTRUCTURE, reason=reason)


def released(node: Node, *, replaced: bool = False) -> Outcome:
    """What a node is told that the job no longer needs."""
    why = "another node takes its place" if replaced else "the job goes on with fewer nodes"
    return Outcome(
        exit_code=ExitCode.SUCCESS,
        reason=f"node {node.id} was released: {why}.",
        released=True,
    )


def loss_of(node: Node, round_: int, now: float) -> Failure:
    """The record of a lost node, for the diagnosis."""
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
    """What a node is told that the job goes on without."""
    return Outcome(
        exit_code=ExitCode.INFRASTRUCTURE, reason=f"node {node.id} is left out: {reason}."
    )
