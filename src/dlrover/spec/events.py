"""The typed events of a job: what ``dlrover events`` shows and ``events.jsonl`` keeps.

An event is written once, at the decision it tells of, and reads as one sentence.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dlrover.spec.failure import Failure, Verdict


class JobSubmitted(msgspec.Struct, frozen=True, tag="job_submitted"):
    """A job was handed to its master."""

    name: str
    min_nodes: int
    max_nodes: int

    def sentence(self) -> str:
        """The event in words."""
        span = (
            f"{self.min_nodes}"
            if self.min_nodes == self.max_nodes
            else f"{self.min_nodes} to {self.max_nodes}"
        )
        return f"Job {self.name} was submitted; it runs on {span} nodes."


class MasterRecovered(msgspec.Struct, frozen=True, tag="master_recovered"):
    """A master took over from the journal of one that died."""

    inputs: int

    def sentence(self) -> str:
        """The event in words."""
        return (
            f"The master is back: it replayed {self.inputs} journal entries; workers kept running."
        )


class MasterAdopted(msgspec.Struct, frozen=True, tag="master_adopted"):
    """A master without a journal took over a round that was running, as its nodes told of it."""

    round: int
    nodes: int

    def sentence(self) -> str:
        """The event in words."""
        return (
            f"The master is back without its journal: it adopted round {self.round} from "
            f"{self.nodes} nodes; workers kept running. The budgets of restarts begin anew."
        )


class NodeLaunched(msgspec.Struct, frozen=True, tag="node_launched"):
    """The platform was asked for a node."""

    node: int
    replaces: int = -1

    def sentence(self) -> str:
        """The event in words."""
        replaced = f" in place of node {self.replaces}" if self.replaces >= 0 else ""
        return f"Node {self.node} is being started{replaced}."


class NodeConnected(msgspec.Struct, frozen=True, tag="node_connected"):
    """An agent connected for the first time."""

    node: int
    hostname: str

    def sentence(self) -> str:
        """The event in words."""
        return f"Node {self.node} connected from {self.hostname}."


class NodeLost(msgspec.Struct, frozen=True, tag="node_lost"):
    """A node is gone for good."""

    node: int
    reason: str

    def sentence(self) -> str:
        """The event in words."""
        return f"Node {self.node} is lost: {self.reason}."


class RoundOpened(msgspec.Struct, frozen=True, tag="round_opened"):
    """Nodes were called to a new rendezvous round."""

    round: int
    reason: str
    awaited: int

    def sentence(self) -> str:
        """The event in words."""
        return f"Round {self.round} opened ({self.reason}); {self.awaited} nodes are awaited."


class RoundCompleted(msgspec.Struct, frozen=True, tag="round_completed"):
    """A world was formed."""

    round: int
    nodes: int
    world_size: int
    seconds: float

    def sentence(self) -> str:
        """The event in words."""
        return (
            f"Round {self.round} is complete after {self.seconds:.2f} s: "
            f"{self.nodes} nodes, {self.world_size} workers."
        )


class WorkerFailed(msgspec.Struct, frozen=True, tag="worker_failed"):
    """A worker ended in failure."""

    failure: Failure
    verdict: Verdict

    def sentence(self) -> str:
        """The event in words."""
        return f"{self.verdict.title} ({self.verdict.origin.value})."


class RestartDecided(msgspec.Struct, frozen=True, tag="restart_decided"):
    """The job goes on after a fault."""

    restart: int
    reason: str

    def sentence(self) -> str:
        """The event in words."""
        return f"Restart {self.restart}: {self.reason}."


class Recovered(msgspec.Struct, frozen=True, tag="recovered"):
    """The first new step after a fault: the incident is over."""

    round: int
    seconds: float

    def sentence(self) -> str:
        """The event in words."""
        return f"Training steps again, {self.seconds:.2f} s after the fault was seen."


class NodeSucceeded(msgspec.Struct, frozen=True, tag="node_succeeded"):
    """All workers of a node ended with exit code 0."""

    node: int

    def sentence(self) -> str:
        """The event in words."""
        return f"All workers of node {self.node} succeeded."


class JobEnded(msgspec.Struct, frozen=True, tag="job_ended"):
    """The job is over."""

    exit_code: int
    reason: str

    def sentence(self) -> str:
        """The event in words."""
        return f"The job ended with exit code {self.exit_code}: {self.reason}"


EventBody: TypeAlias = (
    JobSubmitted
    | MasterRecovered
    | MasterAdopted
    | NodeLaunched
    | NodeConnected
    | NodeLost
    | RoundOpened
    | RoundCompleted
    | WorkerFailed
    | RestartDecided
    | Recovered
    | NodeSucceeded
    | JobEnded
)


class Event(msgspec.Struct, frozen=True):
    """An event with its place in the job's history."""

    seq: int
    """1 for a job's first event; no number is left out."""
    time: float
    """Seconds since the epoch."""
    body: EventBody

    def sentence(self) -> str:
        """The event in words."""
        return self.body.sentence()
