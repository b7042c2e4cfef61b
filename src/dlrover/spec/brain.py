"""What masters tell the Brain and ask it, and what it shows: the records on the wire.

Each report carries a request id. The Brain carries a request out once, however often it comes, and answers
when what it says is committed.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from dlrover.spec.batches import Batches
from dlrover.spec.plan import Group, Plan

Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[!-~]+$")]
"""Of a job, a node, a plan or a request: printable ASCII without blanks."""
JobName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=100)]
"""A job as a list shows it: the operator sees the tenant's name before the id."""
Text: TypeAlias = Annotated[str, Meta(max_length=2000)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e18)]
Positive: TypeAlias = Annotated[float, Meta(gt=0, le=1e18)]
Use: TypeAlias = dict[str, Amount]
"""How much of each resource: ``accelerator``, ``cpu`` (cores), ``memory`` (bytes)."""

Strategy: TypeAlias = Literal["all-reduce", "ps"]
Mode: TypeAlias = Literal["manual", "single-job", "cluster"]
JobState: TypeAlias = Literal["running", "succeeded", "failed", "stopped"]
PlanState: TypeAlias = Literal["applied", "rolled-back", "refused"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The size in which a job runs."""

    groups: dict[str, Group]
    """The nodes by kind: ``worker``, and ``ps`` for servers."""
    batch: Count = 1
    """Samples of one worker process in one pass."""
    passes: Count = 1
    """Passes before the gradients are exchanged."""
    per_node: Count = 1
    """Worker processes of each worker node."""


class Range(msgspec.Struct, frozen=True):
    """The numbers of nodes that are allowed: multiples of ``unit`` between two bounds."""

    least: Count = 1
    most: Count = 1
    unit: Count = 1


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that a job may have. What the user has set has one value."""

    workers: Range = Range()
    """Worker nodes."""
    servers: Range = Range()
    """Servers; only of a parameter-server job."""
    worker_cpu: tuple[Positive, ...] = ()
    """Cores that a worker may have; empty: what it has."""
    server_cpu: tuple[Positive, ...] = ()


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is, and what it may have."""

    name: Text
    strategy: Strategy = "all-reduce"
    mode: Mode = "single-job"
    """Who sizes it: its user, the job alone, or the cluster as a whole."""
    optimizer: Text = ""
    """The name of the optimiser that plans it; empty: the built-in one of its mode."""
    features: Annotated[dict[str, str | float], Meta(max_length=100)] = {}
    """By which similar past jobs are found: user, model, parameters, batch, data set."""
    space: Space = Space()
    groups: dict[str, Group] = {}
    """What each node gets, by kind, as the user has set it; 0 where that is open. Counts are in ``space``."""
    queue: Text = ""
    """The queue whose quota it counts to; empty: none."""
    priority: Positive = 1.0
    total: Amount = 0.0
    """Samples until its end; 0 if that is not known."""
    restart: Amount = 30.0
    """Seconds without progress after its size was changed."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A measured throughput of a size."""

    shape: Shape
    throughput: Positive
    """Samples per second of all workers."""
    compute_seconds: Positive | None = None
    """Of one pass without the exchange of gradients; None where nobody measured it."""
    batches: Batches | None = None
    """Which global batches the job allows; None: each worker's batch stays."""
    done: Amount = 0.0
    """Samples that the job has processed so far; 0 if that is not known."""
    at: Amount = 0.0
    """Seconds since the epoch; 0: when the Brain gets it."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a node of a job uses."""

    node: Id
    """Such as ``worker-0`` or ``ps-1``; keeps its name as long as the job lives."""
    kind: Id = "worker"
    cpu: Amount = 0.0
    """Cores in use."""
    memory: Amount = 0.0
    """Bytes in use."""
    accelerator: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the time that its accelerators compute."""
    progress: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Of the job."""
    at: Amount = 0.0
    """Seconds since the epoch; 0: when the Brain gets it."""


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the cluster."""

    name: Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[!-~]+$")]
    capacity: Use
    used: Use = {}
    """What is asked for on it by everything that runs there."""
    by_jobs: Use = {}
    """The part of ``used`` that nodes of jobs ask for."""
    ready: bool = True
    """Whether new nodes can be put there."""


# ---- requests


class RegisterJob(msgspec.Struct, frozen=True, kw_only=True, tag="register"):
    """A job is there. A master that comes back says it again; the last description holds."""

    request: Id
    job: Id
    description: Description


class ReportSamples(msgspec.Struct, frozen=True, kw_only=True, tag="samples"):
    """Throughputs that a job has measured."""

    request: Id
    job: Id
    samples: Annotated[tuple[Sample, ...], Meta(min_length=1, max_length=1000)]


class ReportUsage(msgspec.Struct, frozen=True, kw_only=True, tag="usage"):
    """What a job's nodes use."""

    request: Id
    job: Id
    nodes: Annotated[tuple[Usage, ...], Meta(min_length=1, max_length=10_000)]


class ReportPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """A plan that the job's master has made itself."""

    request: Id
    job: Id
    plan_id: Id
    plan: Plan
    before: Shape | None = None


class ReportOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """What became of a plan."""

    request: Id
    job: Id
    plan_id: Id
    state: PlanState
    throughput: Amount = 0.0
    """Samples per second that were measured after it; 0 if none were."""
    reason: Text = ""


class EndJob(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """A job has ended."""

    request: Id
    job: Id
    state: JobState
    reason: Text = ""
    shape: Shape | None = None
    """What it had last; None: the shape of its last sample."""


class ReportCluster(msgspec.Struct, frozen=True, kw_only=True, tag="cluster"):
    """All machines of the cluster as they are now; the Brain forgets those that are not named."""

    request: Id
    nodes: Annotated[tuple[ClusterNode, ...], Meta(max_length=20_000)]


class SetQuota(msgspec.Struct, frozen=True, kw_only=True, tag="quota"):
    """What the jobs of a queue may have together; without limits the queue has no quota any more."""

    request: Id
    queue: Id
    limits: Use


Report: TypeAlias = (
    RegisterJob
    | ReportSamples
    | ReportUsage
    | ReportPlan
    | ReportOutcome
    | EndJob
    | ReportCluster
    | SetQuota
)


class Committed(msgspec.Struct, frozen=True):
    """The report is in the database."""


class AskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What should the job have next? The same request gets the same plan again."""

    request: Id
    job: Id
    current: Shape | None = None
    """What it has; None where nothing runs yet."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `AskPlan`."""

    reason: str
    """One sentence, also where there is no plan."""
    plan: Plan | None = None
    """None: the job stays as it is."""
    plan_id: str = ""
    """By which the outcome is reported; empty without a plan."""
    optimizer: str = ""


class AskEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What would a job do with other numbers of nodes?"""

    job: JobName
    workers: Count
    servers: Count | None = None
    """None: as many as it has."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `AskEffect`."""

    shape: Shape
    before: Shape
    plan: Plan
    """The size as a plan, with its effect; nothing is changed by asking."""
    inside: bool
    """Whether it is so near to what was measured that a plan may go there."""


class AskSimilar(msgspec.Struct, frozen=True, kw_only=True):
    """What has the past job measured that is most like this one?"""

    job: JobName


class Similar(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `AskSimilar`: a job that ended well."""

    name: str = ""
    """Empty: no job is similar enough."""
    similarity: float = 0.0
    """From 0 to 1."""
    samples: tuple[Sample, ...] = ()
    """The latest ones, the oldest first."""


# ---- what the Brain shows


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job in a list."""

    job: str
    description: Description
    state: JobState
    registered: float
    """Seconds since the epoch."""
    ended: float | None = None
    reason: str = ""
    """Why it ended."""
    samples: int = 0
    plans: int = 0
    shape: Shape | None = None
    """What it had in its last sample, or at its end."""
    throughput: float = 0.0
    """Of its last sample."""


class AskJobs(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that the Brain knows, the latest first."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    running: bool = False
    """Only those that have not ended."""


class Jobs(msgspec.Struct, frozen=True):
    """The answer to `AskJobs`."""

    jobs: tuple[JobRow, ...]


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and what became of it."""

    plan_id: str
    at: float
    """Seconds since the epoch."""
    optimizer: str
    """Who made it; ``master``: the job's own master."""
    plan: Plan
    before: Shape | None = None
    state: PlanState | None = None
    """None: nobody has reported yet."""
    measured: float = 0.0
    """Samples per second; 0 if none were measured."""
    error: float | None = None
    """By how much that differs from the prediction, relative to it."""
    within: bool | None = None
    """Whether it lies in the predicted interval."""
    reason: str = ""
    """What the job's master says about what became of it."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a node of a job has used."""

    node: str
    kind: str
    heard: float
    """Seconds since the epoch."""
    cpu: float
    """Cores, latest and largest."""
    most_cpu: float
    memory: float
    """Bytes, latest and largest."""
    most_memory: float
    accelerator: float


class Explain(msgspec.Struct, frozen=True):
    """Ask what is known of a job."""

    job: JobName


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """All that the Brain knows of a job."""

    job: JobRow
    plans: tuple[PlanRecord, ...]
    """The last 100, the oldest first."""
    nodes: tuple[NodeRecord, ...]
    samples: tuple[Sample, ...]
    """The last 200, the oldest first."""


class AskCluster(msgspec.Struct, frozen=True):
    """Ask what the cluster has."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster has; empty where nobody told."""

    nodes: tuple[ClusterNode, ...] = ()
    seen: float = 0.0
    """When; seconds since the epoch."""
    capacity: Use = {}
    """Of the machines that are ready."""
    free: Use = {}
    quotas: dict[str, Use] = {}
    """By queue."""


class AskDivision(msgspec.Struct, frozen=True):
    """How would the cluster be divided among its jobs now?"""


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `AskDivision`: an advice for each job whose mode is ``cluster``."""

    advice: dict[str, Advice]
    seconds: float
    """That it took."""
