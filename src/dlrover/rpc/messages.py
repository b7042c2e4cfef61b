"""The messages on the wire: frozen records, encoded as MessagePack. Nothing in them is executable.

An agent holds one stream to its master (`AgentMessage` up, `MasterMessage` down). Each message states a
fact and may be repeated: after a reconnection the agent says again what still holds, and the master what
the agent has missed. Everything else is a single request with a deadline.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dlrover.spec.activity import WorkerActivity
from dlrover.spec.check import CheckOrder, CheckReport
from dlrover.spec.events import Event
from dlrover.spec.failure import Failure
from dlrover.spec.outcome import Outcome
from dlrover.spec.roles import WORKER, Size
from dlrover.spec.stacks import Group, WorkerEvidence
from dlrover.spec.usage import NodeUsage
from dlrover.spec.world import Holding, Offer, World

# ---- agent to master


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message on a stream. Fields as in the machine's ``NodeConnected``."""

    uid: str
    node_id: int = -1
    node_rank: int = -1
    hostname: str = ""
    round: int = 0
    held: Holding | None = None
    epoch: int = 0
    """The highest epoch of a master that the agent has met; 0 for none."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """No workers run here; the node is ready for ``round``."""

    round: int
    offer: Offer


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The agent is alive; its workers of ``round`` have completed ``steps`` optimizer steps."""

    round: int
    steps: int
    workers: tuple[WorkerActivity, ...] = ()
    """What they do, by local rank."""
    usage: NodeUsage | None = None
    """What the node uses; now and then."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A worker failed."""

    failure: Failure


class Succeeded(msgspec.Struct, frozen=True, tag="succeeded"):
    """All workers of ``round`` ended with exit code 0."""

    round: int


class Evidence(msgspec.Struct, frozen=True, tag="evidence"):
    """The answer to `CollectEvidence`: what is to be seen of the node's workers of ``round``."""

    id: int
    round: int
    workers: tuple[WorkerEvidence, ...]


AgentMessage: TypeAlias = Hello | Join | Heartbeat | Failed | Succeeded | Evidence | CheckReport

# ---- master to agent


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The node's id, the round it may join, and how often it must be heard of (seconds)."""

    node_id: int
    round: int
    heartbeat_interval: float
    epoch: int = 0
    """Counts the masters of the job: an agent refuses one with a lower epoch than it has met."""


class CallToRound(msgspec.Struct, frozen=True, tag="call_to_round"):
    """Stop the workers and join ``round``."""

    round: int
    reason: str


class AssignWorld(msgspec.Struct, frozen=True, tag="assign_world"):
    """The round is complete: start the workers."""

    world: World
    fresh: bool = False
    """Start them from processes that have loaded nothing yet."""


class Dismiss(msgspec.Struct, frozen=True, tag="dismiss"):
    """Stop the workers and leave."""

    outcome: Outcome


class CollectEvidence(msgspec.Struct, frozen=True, tag="collect_evidence"):
    """Look at the workers: something may hang, or somebody asks."""

    id: int


MasterMessage: TypeAlias = (
    Welcome | CallToRound | AssignWorld | Dismiss | CollectEvidence | CheckOrder
)

# ---- requests


class NodeState(msgspec.Struct, frozen=True, gc=False):
    """One node in a `Status`. Holds no container: thousands at once must not set off the collector."""

    id: int
    node_rank: int
    status: str
    hostname: str
    connected: bool
    steps: int = 0
    doing: str = ""
    """What its workers do, and how long they have been doing it; empty if that is not known."""
    role: str = ""
    """``worker`` or ``ps``; empty in a job without servers."""
    memory: int = 0
    """Bytes that it uses; with `NodeUsage` these fields say more. All are 0 as long as nothing is known."""
    memory_limit: int = 0
    cpu: float = 0.0
    """Cores that it keeps busy."""
    cores: float = 0.0
    """Cores that it may keep busy."""
    busy: float = -1.0
    """Share of time in which its accelerators work; -1 if that is not known."""


class StatusRequest(msgspec.Struct, frozen=True):
    """Ask where the job stands."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Where the job stands."""

    name: str
    phase: str
    round: int
    world_size: int
    restarts: int
    steps: int
    """Optimizer steps of the current round."""
    total_steps: int
    """Optimizer steps of all rounds, repeated ones included."""
    step: int = -1
    """Number of the last step that was completed, -1 where the program does not report it."""
    waiting_for: str
    nodes: tuple[NodeState, ...]
    outcome: Outcome | None = None
    seconds: float = 0.0
    slow: tuple[str, ...] = ()
    """A sentence for each slow rank."""
    size: str = ""
    """How many nodes of how many, in words; empty where the number is fixed."""
    servers: int = 0
    """How many of the world's processes are servers."""

    def processes(self) -> str:
        """The world's processes in words: ``4 workers``, ``4 workers and 2 servers``."""
        workers = Size(self.world_size - self.servers, self.servers)
        if self.servers:
            return workers.sentence_part()
        return f"{self.world_size} worker{'' if self.world_size == 1 else 's'}"


class StacksRequest(msgspec.Struct, frozen=True):
    """Ask where every rank is now."""


class Stacks(msgspec.Struct, frozen=True):
    """Where every rank is."""

    round: int
    groups: tuple[Group, ...]
    missing: tuple[int, ...]
    """Ranks that did not answer."""
    report: str
    """The groups with the stacks of one rank each."""


class WatchRequest(msgspec.Struct, frozen=True):
    """Ask for the events after number ``since``; with ``follow`` also for those to come."""

    since: int = 0
    follow: bool = False


class Notice(msgspec.Struct, frozen=True):
    """One item of a watch: new events, and where the job stands after them."""

    events: tuple[Event, ...]
    status: Status


class StopRequest(msgspec.Struct, frozen=True):
    """Ask to stop the job."""

    reason: str
    exit_code: int


class ScaleRequest(msgspec.Struct, frozen=True):
    """Ask for another number of nodes."""

    nodes: int
    reason: str
    """Why, as part of a sentence."""
    role: str = WORKER
    """Of these nodes."""


class ScaleReply(msgspec.Struct, frozen=True):
    """What follows, or why nothing does."""

    sentence: str
    refused: bool = False


class Done(msgspec.Struct, frozen=True):
    """The request was carried out."""


class SetKey(msgspec.Struct, frozen=True, tag="set"):
    """Set a key."""

    key: str
    value: bytes


class GetKey(msgspec.Struct, frozen=True, tag="get"):
    """Read a key, waiting up to ``wait`` seconds until somebody sets it."""

    key: str
    wait: float = 0.0


class AddToKey(msgspec.Struct, frozen=True, tag="add"):
    """Add to a counter, which starts at 0; ``request_id`` makes a repeated request count once."""

    key: str
    amount: int
    request_id: str


class DeleteKeys(msgspec.Struct, frozen=True, tag="delete"):
    """Delete every key that starts with ``prefix``."""

    prefix: str


class EnterBarrier(msgspec.Struct, frozen=True, tag="barrier"):
    """Wait up to ``wait`` seconds until ``size`` different members have entered the barrier."""

    name: str
    member: str
    size: int
    wait: float


StoreRequest: TypeAlias = SetKey | GetKey | AddToKey | DeleteKeys | EnterBarrier


class StoreReply(msgspec.Struct, frozen=True):
    """The value after a store request; None if the key is not set or the wait timed out."""

    value: bytes | None
