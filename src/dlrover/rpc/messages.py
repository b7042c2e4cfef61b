"""The messages on the wire: frozen records, encoded as MessagePack, without executable content.

An agent holds one stream to its master (`AgentMessage` up, `MasterMessage` down). Each message states a
fact and may be repeated: after a reconnection, the agent repeats the facts that still hold, and the master
those that the agent missed. Everything else is a single request with a deadline.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from dlrover.spec.check import CheckOrder, CheckReport
from dlrover.spec.events import Event
from dlrover.spec.failure import Failure
from dlrover.spec.measurements import NodeUsage, WorkerActivity
from dlrover.spec.node import WORKER, Size
from dlrover.spec.numbers import Count
from dlrover.spec.outcome import Outcome
from dlrover.spec.requests.membership import Members
from dlrover.spec.stacks import StackGroup, WorkerEvidence
from dlrover.spec.words import counted
from dlrover.spec.world import Holding, Offer, World

MODULES_LIMIT = 1 << 20
"""Maximum size of a list of modules in bytes."""

# ---- agent to master


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message on a stream; also an input of the master's machine.

    ``uid`` is unique to the agent process. ``node_id`` is the id that it was launched with or got earlier; -1
    for none. ``round`` is the round whose workers it runs; 0 for none. ``held`` has the details.
    """

    uid: str
    node_id: int = -1
    node_rank: int = -1
    hostname: str = ""
    round: Count = 0
    held: Holding | None = None
    epoch: Count = 0
    """Highest epoch of a master that the agent has met; 0 for none."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Readiness of the node for ``round``; no workers run on it."""

    round: int
    offer: Offer


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sign of life of the agent; all its workers of ``round`` have completed ``steps`` steps."""

    round: int
    steps: Count
    workers: tuple[WorkerActivity, ...] = ()
    """Activities of the workers, by local rank; empty if unknown."""
    usage: NodeUsage | None = None
    """Resource usage of the node; only in some heartbeats."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Report of a worker's failure."""

    failure: Failure


class Succeeded(msgspec.Struct, frozen=True, tag="succeeded"):
    """Report that all the node's workers of ``round`` ended with exit code 0."""

    round: int


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Notice that the agent shuts down, for instance on a signal: it stops its workers and leaves."""

    reason: str
    """One sentence."""


class Evidence(msgspec.Struct, frozen=True, tag="evidence"):
    """The answer to `CollectEvidence`: evidence of the node's workers of ``round``."""

    id: int
    round: int
    workers: tuple[WorkerEvidence, ...]


class ModulesListed(msgspec.Struct, frozen=True, tag="modules_listed"):
    """The list (JSON) of the modules that the program has loaded, from the node with node rank 0."""

    modules: Annotated[bytes, msgspec.Meta(max_length=MODULES_LIMIT)]


class StoredPlace(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint directory, and what became of a save that a user asked for."""

    directory: str
    step: int = -1
    """The step that is stored now; -1 if none is."""
    problem: str = ""
    """Why none is, in one sentence."""


WORKERS_ENDED = "the workers have ended"
"""Why savers store steps without a user's request."""


class MemoryStored(msgspec.Struct, frozen=True, tag="memory_stored"):
    """The answer to `StoreMemory`: a place for each saver of the node; none if its workers save nothing to memory."""

    id: str
    """That of the `StoreMemory`; empty for what became of the steps in memory once the workers had ended."""
    places: tuple[StoredPlace, ...]


AgentMessage: TypeAlias = (
    Hello
    | Join
    | Heartbeat
    | Failed
    | Succeeded
    | Leaving
    | Evidence
    | MemoryStored
    | CheckReport
    | ModulesListed
)

# ---- master to agent


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to `Hello`: the node's id, the round to join, and the heartbeat interval in seconds."""

    node_id: int
    round: int
    heartbeat_interval: float
    epoch: int = 0
    """Counter of the job's masters; an agent refuses a master with a lower epoch than it has met."""


class CallToRound(msgspec.Struct, frozen=True, tag="call_to_round"):
    """Order to stop the workers and join ``round``."""

    round: int
    reason: str
    store: bool = False
    """True to store what the workers have in memory: a node leaves on purpose, with its part of it."""


class AssignWorld(msgspec.Struct, frozen=True, tag="assign_world"):
    """Order to start the workers: the round is complete."""

    world: World
    fresh: bool = False
    """True to start them from processes that have loaded nothing yet."""
    place: int = -1
    """Wanted rank of the node, which a spare gets only now; -1: none."""


class StandBy(msgspec.Struct, frozen=True, tag="stand_by"):
    """Notice that the node is a spare: no world needs it now. It should have everything ready to start workers."""

    modules: bytes = b""
    """List of the modules that the program loads, as `ModulesListed` brings it; empty while unknown."""


class StartAgain(msgspec.Struct, frozen=True, tag="start_again"):
    """Order to start ended workers of ``round`` again; the other workers go on."""

    round: int
    attempts: dict[int, int]
    """Attempt of each worker's process, by local rank; who runs in that attempt is not started again."""
    fresh: bool = False
    """True if they are to start from a process that has loaded nothing yet."""


class Dismiss(msgspec.Struct, frozen=True, tag="dismiss"):
    """Order to stop the workers and leave the job."""

    outcome: Outcome
    store: bool = False
    """True to store what the workers have in memory first, together with the job's other nodes."""
    partial: bool = False
    """True if nodes of the world are lost: their savers cannot take part."""


class CollectEvidence(msgspec.Struct, frozen=True, tag="collect_evidence"):
    """Order to collect evidence of the workers, on a suspected hang or a user's request."""

    id: int


class StoreMemory(msgspec.Struct, frozen=True, tag="store_memory"):
    """Order to store the newest save in the node's memory, as a user asks for."""

    id: str
    """Unique number of the request."""


MasterMessage: TypeAlias = (
    Welcome
    | CallToRound
    | AssignWorld
    | Members
    | StartAgain
    | StandBy
    | Dismiss
    | CollectEvidence
    | StoreMemory
    | CheckOrder
)

# ---- requests


class NodeState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One node in a `Status`, without names on the wire: a status has thousands.

    It holds no container, so that they do not trigger garbage collection.
    """

    id: int
    node_rank: int
    status: str
    hostname: str
    connected: bool
    steps: int = 0
    doing: str = ""
    """Activity of its workers and for how long; empty if unknown."""
    role: str = ""
    """``worker`` or ``ps``; empty in a job without servers."""
    memory: int = 0
    """Bytes in use. This and the next three fields are from `NodeUsage`, and 0 while unknown."""
    memory_limit: int = 0
    cpu: float = 0.0
    """Cores in use."""
    cores: float = 0.0
    """Cores that the node may use."""
    busy: float = -1.0
    """Share of time in which its accelerators work, 0 to 1; -1 if unknown."""


class StatusRequest(msgspec.Struct, frozen=True):
    """Request for the job's status."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the job."""

    name: str
    phase: str
    round: int
    world_size: int
    restarts: int
    steps: int
    """Steps of the current round."""
    total_steps: int
    """Steps of all rounds, repeated ones included."""
    step: int = -1
    """Number of the last completed step; -1 if the program does not report it."""
    waiting_for: str
    nodes: tuple[NodeState, ...]
    outcome: Outcome | None = None
    seconds: float = 0.0
    slow: tuple[str, ...] = ()
    """A sentence for each slow rank."""
    size: str = ""
    """Number of nodes, its range and the auto-scaler's stage, in words; empty if the number is fixed."""
    instances: int = 0
    """Number of instances, which are outside the world."""
    servers: int = 0
    """Number of servers, instances included."""
    rate: float = 0.0
    """Steps per second lately; 0 while unknown."""
    seconds_left: float = -1.0
    """Seconds until the training ends at the pace of this round; -1 while unknown."""

    def processes(self) -> str:
        """Return the world's processes in words: ``4 workers``, ``4 workers and 2 servers``."""
        workers = self.world_size + self.instances - self.servers
        if self.servers:
            return Size(workers, self.servers).in_words()
        return counted(workers, "worker")


class RanksRequest(msgspec.Struct, frozen=True):
    """Request for what every rank does."""


class RankActivity(msgspec.Struct, frozen=True, array_like=True):
    """One rank in `RanksReply`: the latest report of its worker."""

    rank: int
    node: int
    worker: WorkerActivity


class RanksReply(msgspec.Struct, frozen=True):
    """What every rank of the running round does, as far as its node has reported it."""

    round: int
    ranks: tuple[RankActivity, ...]


class StacksRequest(msgspec.Struct, frozen=True):
    """Request for the current stacks of every rank."""


class Stacks(msgspec.Struct, frozen=True):
    """The stacks of every rank, grouped."""

    round: int
    groups: tuple[StackGroup, ...]
    missing: tuple[int, ...]
    """Ranks that did not answer."""
    report: str
    """Text of the groups, each with the stacks of one of its ranks."""


class WatchRequest(msgspec.Struct, frozen=True):
    """Request for the events after number ``since``; with ``follow``, also for future ones."""

    since: int = 0
    follow: bool = False


class Notice(msgspec.Struct, frozen=True):
    """One item of a watch: new events, and the job's status after them."""

    events: tuple[Event, ...]
    status: Status


class StopRequest(msgspec.Struct, frozen=True, tag="stop_request"):
    """Request to stop the job; also an input of the master's machine."""

    reason: str
    exit_code: int


class ScaleRequest(msgspec.Struct, frozen=True):
    """Request to change the number of nodes of a role."""

    nodes: int
    reason: str
    """Reason, as part of a sentence."""
    role: str = WORKER
    """Role of these nodes."""


class ScaleReply(msgspec.Struct, frozen=True):
    """The answer to `ScaleRequest`, `DrainRequest` and `SaveRequest`: a sentence on its effect, or on why it was refused."""

    sentence: str
    refused: bool = False


class DrainRequest(msgspec.Struct, frozen=True):
    """Request to put another node in the place of one, which trains until the other has joined."""

    node: int
    reason: str
    """Reason, as part of a sentence."""


class SaveRequest(msgspec.Struct, frozen=True):
    """Request to store the newest memory checkpoint of the training."""

    reason: str
    """Reason, as part of a sentence."""


class Done(msgspec.Struct, frozen=True):
    """Confirmation that the request was carried out."""


# ---- batched requests

MAX_RECORDS = 1000
"""Maximum number of records in a frame."""


class Record(NamedTuple):
    """One encoded request, or the reply to the request of this number on the same stream."""

    number: int
    body: bytes


class RequestFrame(msgspec.Struct, frozen=True):
    """Requests that wait at the same time, or replies that are ready at the same time.

    Each body is decoded by itself, so that an unreadable request fails alone.
    """

    records: Annotated[tuple[Record, ...], msgspec.Meta(max_length=MAX_RECORDS)]
