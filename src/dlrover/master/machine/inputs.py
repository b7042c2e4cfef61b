"""Inputs of the job machine, which are journalled before they are handled, and its commands."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from dlrover.rpc.messages import (
    AssignWorld,
    CallToRound,
    Dismiss,
    Hello,
    Join,
    Leaving,
    StandBy,
    StartAgain,
    StopRequest,
    Succeeded,
    Welcome,
)
from dlrover.spec.check import CheckOrder, CheckReport
from dlrover.spec.events import (
    EventBody,
    HangFound,
    MemoryGrows,
    NodeWaits,
    SlowRank,
    SlowRankRecovered,
    StepStored,
    WorkerFailed,
)
from dlrover.spec.failure import Rule
from dlrover.spec.job import JobSpec
from dlrover.spec.measurements import ModelProfile, SpeedSample
from dlrover.spec.node import WORKER, FoundNode, LaunchNode
from dlrover.spec.outcome import Outcome
from dlrover.spec.plan import ScaleDecision
from dlrover.spec.requests.membership import Members, MembershipChange

# ---- inputs, beside messages and events that are inputs themselves


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    """The job was submitted. This is the first input and comes once.

    A master that has lost its journal gets it, too: ``found`` are the nodes that its platform already runs,
    and ``earlier_events`` is the number of events that an earlier master recorded. ``rules`` are this
    release's diagnosis rules, which apply after the job's own; the journal has them, so that replays diagnose
    alike.
    """

    job: JobSpec
    job_dir: str = ""
    found: tuple[FoundNode, ...] = ()
    earlier_events: int = 0
    rules: tuple[Rule, ...] = ()


class MasterStarted(msgspec.Struct, frozen=True, tag="master_started"):
    """A master process starts or takes over; the previous master's connections are gone."""

    replayed: int = 0
    """Number of the journal's entries."""
    last: float = 0.0
    """Time of the journal's last entry, which may be none of the job machine's; 0: there is none."""
    earlier_events: int = 0
    """Number of events that earlier masters recorded; the journal may have lost the inputs of the last ones."""


class NodePlaced(msgspec.Struct, frozen=True, tag="node_placed"):
    """The platform started a node; ``handle`` finds it again after a restart of the master."""

    node_id: int
    handle: str


class NodeExited(msgspec.Struct, frozen=True, tag="node_exited"):
    """The platform reports that a node's agent ended."""

    node_id: int
    reason: str
    exit_code: int = 0
    """Exit code of the agent, if the platform knows it."""
    refused: bool = False
    """True if the platform can make neither this node nor another one in its place."""
    removed: bool = False
    """True if something else ended the node, such as a preemption; that says nothing about its command."""


class NodeDisconnected(msgspec.Struct, frozen=True, tag="node_disconnected"):
    """An agent's stream broke."""

    node_id: int


class NodeSilent(msgspec.Struct, frozen=True, tag="node_silent"):
    """An agent sent nothing for the heartbeat timeout although its stream is open."""

    node_id: int
    seconds: float


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """A connected node reports that it is ready for a round, was checked, leaves, or that its workers succeeded."""

    node_id: int
    message: Join | CheckReport | Leaving | Succeeded


class Progressed(msgspec.Struct, frozen=True, tag="progressed"):
    """A round's workers have completed ``steps`` optimizer steps."""

    round: int
    steps: int
    seconds: tuple[float, ...] = ()
    """Mean duration of each `Activity` over the workers so far; empty while unknown."""
    first_step: int = -1
    """Number of the step that the round began with; -1 while unknown."""
    idle: float = 0.0
    """Seconds since the latest step, if all workers have been in the next one since; ``seconds`` leave them out."""
    ended: float = 0.0
    """Mean age of the workers in seconds at their end; 0 while any of them lives."""


class Hung(msgspec.Struct, frozen=True, tag="hung"):
    """The training of a round hangs; ``restart`` asks for a restart of its workers."""

    found: HangFound
    restart: bool


class RankSpeed(msgspec.Struct, frozen=True, tag="rank_speed"):
    """A rank of ``round`` has become slow or has recovered."""

    round: int
    found: SlowRank | SlowRankRecovered


class SpeedMeasured(msgspec.Struct, frozen=True, tag="speed_measured"):
    """A window of steady training of ``round`` was measured."""

    round: int
    sample: SpeedSample
    profile: ModelProfile = ModelProfile()
    held_up: bool = False
    """True if a rank may have been slow during the window."""


class MemoryForecast(msgspec.Struct, frozen=True, tag="memory_forecast"):
    """A node of ``round`` is expected to run out of memory."""

    round: int
    found: MemoryGrows
    enough: int = 0
    """Bytes that are enough, with a margin; 0: those that the node is expected to need."""


class ServersBusy(msgspec.Struct, frozen=True, tag="servers_busy"):
    """Parameter servers of ``round`` are overloaded; the input asks for one of three remedies."""

    round: int
    migrate: dict[int, float]
    """Cores that each hot server needs, as a multiple of its present cores, by node."""
    more: bool
    """True if the job needs another server."""
    rebalance: bool
    """True if a new round should open in which the program redistributes its parameters."""
    gain: float
    """Expected gain as a share of the job's speed."""
    reason: str


class ScalePlanned(msgspec.Struct, frozen=True, tag="scale_planned"):
    """The planner has evaluated the measurements; None: no other size is worth a change."""

    round: int
    decision: ScaleDecision | None


class MigrationRequested(msgspec.Struct, frozen=True, tag="migration_requested"):
    """Replace a training node by a new one; the old node trains until the new one has joined.

    A request that `Resizer.migration_refusal` refuses changes nothing.
    """

    node_id: int
    cpu_factor: float
    """Cores of the new node as a multiple of the job's request, as in `Node.cpu_factor`."""
    memory_factor: float
    """Memory of the new node as a multiple of the job's request, limited to what the platform can give."""
    reason: str
    """Reason as a clause: ``its queue is long``."""


class ScaleRequested(msgspec.Struct, frozen=True, tag="scale_requested"):
    """Another number of managed nodes was requested.

    A request that `Scaling.refusal` refuses changes nothing. A request for the number that is already wanted
    changes no node, but a user's still overrules plans.
    """

    nodes: int
    """Number of nodes of ``role``, which is ``worker`` or ``ps``."""
    reason: str
    """Reason as part of a sentence."""
    source: Literal["user", "plan"]
    """Origin of the request. A ``user`` may ask for any number, and it stays. A ``plan`` stays within the
    bounds of the submitted job and gives way to a user."""
    role: str = WORKER
    factors: tuple[float, float] = (1.0, 1.0)
    """CPU and memory multipliers, relative to the job's request, for nodes launched by this change."""


class MemberReported(msgspec.Struct, frozen=True, tag="member_reported"):
    """A rank asks to train with the others again, or has finished the training."""

    change: MembershipChange


class DeadlinePassed(msgspec.Struct, frozen=True, tag="deadline_passed"):
    """The time that the machine's ``deadline()`` returned has come."""


Input: TypeAlias = (
    Submitted
    | MasterStarted
    | NodePlaced
    | NodeWaits
    | NodeExited
    | Hello
    | NodeDisconnected
    | NodeSilent
    | Reported
    | WorkerFailed
    | Progressed
    | Hung
    | RankSpeed
    | SpeedMeasured
    | MemoryForecast
    | ServersBusy
    | ScalePlanned
    | MigrationRequested
    | StopRequest
    | ScaleRequested
    | MemberReported
    | StepStored
    | DeadlinePassed
)

# ---- commands


class KillNode(msgspec.Struct, frozen=True):
    """End a node through the platform: it is lost and must not return."""

    node_id: int


class Greet(msgspec.Struct, frozen=True):
    """Answer the agent ``uid``, whose stream then belongs to the node; the shell adds its epoch."""

    uid: str
    message: Welcome


class Say(msgspec.Struct, frozen=True):
    """Send a node an order."""

    node_id: int
    message: CallToRound | AssignWorld | StandBy | Members | StartAgain | Dismiss | CheckOrder


class TellMembers(msgspec.Struct, frozen=True):
    """Send all nodes of the world the present membership: once for all inputs that are handled together."""


class Emit(msgspec.Struct, frozen=True):
    """Record an event."""

    body: EventBody


class EndJob(msgspec.Struct, frozen=True):
    """End the job; the master may exit once the nodes have left."""

    outcome: Outcome


Command: TypeAlias = LaunchNode | KillNode | Greet | Say | TellMembers | Emit | EndJob
