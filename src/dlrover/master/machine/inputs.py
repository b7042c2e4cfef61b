"""What the job machine is told (journalled before it is handled) and what it orders in return."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from dlrover.spec.check import CheckOrder, CheckReport
from dlrover.spec.events import EventBody, HangFound, SlowRank, SlowRankRecovered
from dlrover.spec.failure import Failure
from dlrover.spec.job import JobSpec
from dlrover.spec.node import FoundNode, LaunchNode
from dlrover.spec.outcome import Outcome
from dlrover.spec.roles import WORKER
from dlrover.spec.rules import Rule
from dlrover.spec.speed import ModelProfile, ScaleDecision, SpeedSample
from dlrover.spec.world import Holding, Offer, World

# ---- inputs


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    """The job is handed over. The first input, once.

    A master that has lost its journal gets it, too: ``found`` are the nodes that its platform runs
    already, ``earlier_events`` counts the events that an earlier master has recorded. ``rules`` are the rows of
    diagnosis that come with this release, tried after the job's own: a replay diagnoses as the job did.
    """

    job: JobSpec
    job_dir: str = ""
    found: tuple[FoundNode, ...] = ()
    earlier_events: int = 0
    rules: tuple[Rule, ...] = ()


class MasterStarted(msgspec.Struct, frozen=True, tag="master_started"):
    """A master process begins or takes over; connections of the last one are gone."""

    replayed: int = 0


class NodePlaced(msgspec.Struct, frozen=True, tag="node_placed"):
    """The platform started a node; ``handle`` finds it again after a restart of the master."""

    node_id: int
    handle: str


class NodeWaits(msgspec.Struct, frozen=True, tag="node_waits"):
    """The platform tells what keeps a node from starting; empty: nothing any more."""

    node_id: int
    reason: str


class NodeExited(msgspec.Struct, frozen=True, tag="node_exited"):
    """The platform reports that a node's agent ended."""

    node_id: int
    reason: str
    exit_code: int = 0
    """The agent's, where the platform knows it."""
    refused: bool = False
    """The platform cannot make the node, and will not be able to make another one in its place."""


class NodeConnected(msgspec.Struct, frozen=True, tag="node_connected"):
    """An agent opened its stream, for the first time or again.

    ``uid`` is unique to the agent process. ``node_id`` is the id it was launched with or given
    before, -1 for none. ``round`` is the round whose workers it runs, 0 for none; ``held`` tells more.
    """

    uid: str
    node_id: int
    node_rank: int
    hostname: str
    round: int
    held: Holding | None = None


class NodeDisconnected(msgspec.Struct, frozen=True, tag="node_disconnected"):
    """An agent's stream broke."""

    node_id: int


class NodeSilent(msgspec.Struct, frozen=True, tag="node_silent"):
    """An agent sent nothing for the heartbeat time-out though its stream is open."""

    node_id: int
    seconds: float


class NodeJoined(msgspec.Struct, frozen=True, tag="node_joined"):
    """A node without running workers is ready for ``round``."""

    node_id: int
    round: int
    offer: Offer


class NodeChecked(msgspec.Struct, frozen=True, tag="node_checked"):
    """A node has carried out an order of the node check."""

    node_id: int
    report: CheckReport


class WorkerFailed(msgspec.Struct, frozen=True, tag="worker_failed"):
    """A worker of the round ``failure.round`` ended in failure."""

    failure: Failure


class NodeSucceeded(msgspec.Struct, frozen=True, tag="node_succeeded"):
    """All workers of a node ended with exit code 0."""

    node_id: int
    round: int


class Progressed(msgspec.Struct, frozen=True, tag="progressed"):
    """A round's workers have completed ``steps`` optimizer steps."""

    round: int
    steps: int
    seconds: tuple[float, ...] = ()
    """How long its workers have been doing each `Activity`, the mean; empty while that is not known."""
    first_step: int = -1
    """The number of the step that the round began with, -1 while that is not known."""


class Hung(msgspec.Struct, frozen=True, tag="hung"):
    """The training of a round hangs; with ``restart`` its workers are to be restarted."""

    found: HangFound
    restart: bool


class RankSpeed(msgspec.Struct, frozen=True, tag="rank_speed"):
    """A rank of ``round`` has become slow, or is no longer."""

    round: int
    found: SlowRank | SlowRankRecovered


class SpeedMeasured(msgspec.Struct, frozen=True, tag="speed_measured"):
    """A window of steady training of ``round`` was measured."""

    round: int
    sample: SpeedSample
    profile: ModelProfile = ModelProfile()
    held_up: bool = False
    """Whether a rank may have been slow in it."""


class MemoryForecast(msgspec.Struct, frozen=True, tag="memory_forecast"):
    """A node of ``round`` will not have enough memory."""

    round: int
    node_id: int
    needed: int
    """Bytes."""
    limit: int
    seconds: float
    """How far ahead the forecast reaches."""
    memory: int = 0
    """Bytes that are enough, with a margin; 0: ``needed``."""


class ServersBusy(msgspec.Struct, frozen=True, tag="servers_busy"):
    """Parameter servers of ``round`` have too much to do; what is asked for is one of three things."""

    round: int
    migrate: dict[int, float]
    """How many times its cores each hot server needs, by node."""
    more: bool
    """Another server."""
    rebalance: bool
    """A new round, in which the program divides its parameters anew."""
    gain: float
    """The share of its speed that the job is expected to win."""
    reason: str


class ScalePlanned(msgspec.Struct, frozen=True, tag="scale_planned"):
    """The planner has looked at what was measured; None: no other size is worth a change."""

    round: int
    decision: ScaleDecision | None


class MigrateAsked(msgspec.Struct, frozen=True, tag="migrate_asked"):
    """Have another node in the place of one that trains, which trains on until the other has joined.

    What `JobMachine.migration_refusal` has a sentence for changes nothing.
    """

    node_id: int
    cpu_factor: float
    """How many times the cores that the job asked for the other one shall have. As its node has: `Node.cpu_factor`."""
    memory_factor: float
    """The same of its memory, up to what the platform can give."""
    reason: str
    """Why, as a clause: ``its queue is long``."""


class StopRequested(msgspec.Struct, frozen=True, tag="stop_requested"):
    """Somebody asked to stop the job."""

    reason: str
    exit_code: int


class ScaleAsked(msgspec.Struct, frozen=True, tag="scale_asked"):
    """Somebody wants another number of managed nodes.

    What `Scaling.refusal` has a sentence for changes nothing, and neither does the number that is wanted
    already.
    """

    nodes: int
    """Nodes of ``role``, which is ``worker`` or ``ps``."""
    reason: str
    """Why, as part of a sentence."""
    source: Literal["user", "plan"]
    """Who: a ``user``'s number may be any and counts for good, that of a ``plan`` stays within the bounds
    that the job was submitted with and gives way to a user's."""
    role: str = WORKER
    factors: tuple[float, float] = (1.0, 1.0)
    """How many times the cores and the memory that the job asked for those get that are launched for it."""


class DeadlinePassed(msgspec.Struct, frozen=True, tag="deadline_passed"):
    """The time that the machine named in ``deadline()`` has come."""


Input: TypeAlias = (
    Submitted
    | MasterStarted
    | NodePlaced
    | NodeWaits
    | NodeExited
    | NodeConnected
    | NodeDisconnected
    | NodeSilent
    | NodeJoined
    | NodeChecked
    | WorkerFailed
    | NodeSucceeded
    | Progressed
    | Hung
    | RankSpeed
    | SpeedMeasured
    | MemoryForecast
    | ServersBusy
    | ScalePlanned
    | MigrateAsked
    | StopRequested
    | ScaleAsked
    | DeadlinePassed
)

# ---- commands


class KillNode(msgspec.Struct, frozen=True):
    """End a node through the platform: it is lost and must not return."""

    node_id: int


class Welcome(msgspec.Struct, frozen=True):
    """Tell the agent ``uid`` its node id and the round it may join."""

    uid: str
    node_id: int
    round: int


class CallToRound(msgspec.Struct, frozen=True):
    """Tell a node to stop its workers and join ``round``."""

    node_id: int
    round: int
    reason: str


class OrderCheck(msgspec.Struct, frozen=True):
    """Tell a node to check itself."""

    node_id: int
    order: CheckOrder


class AssignWorld(msgspec.Struct, frozen=True):
    """Tell a node its place in a completed round."""

    node_id: int
    world: World
    fresh: bool = False
    """Its workers start from processes that have loaded nothing yet."""


class Dismiss(msgspec.Struct, frozen=True):
    """Tell a node that the job is over, or that it itself is no longer part of it."""

    node_id: int
    outcome: Outcome


class Emit(msgspec.Struct, frozen=True):
    """Record an event."""

    body: EventBody


class EndJob(msgspec.Struct, frozen=True):
    """The job is over; the master may leave when its nodes have left."""

    outcome: Outcome


Command: TypeAlias = (
    LaunchNode
    | KillNode
    | Welcome
    | CallToRound
    | OrderCheck
    | AssignWorld
    | Dismiss
    | Emit
    | EndJob
)
