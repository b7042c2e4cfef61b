"""Messages between masters and the Brain, and what the Brain shows: the records on the wire.

Each report carries a request id. The Brain executes a request once, however often it arrives, and answers
when the result is committed.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from dlrover.spec.measurements import Batches
from dlrover.spec.outcome import Outcome
from dlrover.spec.plan import NodeGroup, ResourcePlan

Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[!-~]+$")]
"""Id of a job, a node, a plan or a request: printable ASCII without blanks."""
JobName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=100)]
"""Name of a job as lists show it: for the operator, the tenant's name precedes the id."""
Text: TypeAlias = Annotated[str, Meta(max_length=2000)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e18)]
Positive: TypeAlias = Annotated[float, Meta(gt=0, le=1e18)]
Use: TypeAlias = dict[str, Amount]
"""Amount of each resource: ``accelerator``, ``cpu`` (cores), ``memory`` (bytes)."""

Strategy: TypeAlias = Literal["all-reduce", "ps"]
Mode: TypeAlias = Literal["manual", "single-job", "cluster"]
JobState: TypeAlias = Literal["running", "succeeded", "failed", "stopped"]
PlanState: TypeAlias = Literal["applied", "rolled-back", "refused"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Size in which a job runs."""

    groups: dict[str, NodeGroup]
    """Nodes by kind: ``worker``, and ``ps`` for servers."""
    batch: Count = 1
    """Samples of one worker in one pass."""
    passes: Count = 1
    """Passes before the gradients are exchanged."""
    per_node: Count = 1
    """Workers on each worker node."""


class Range(msgspec.Struct, frozen=True):
    """Allowed numbers of nodes: multiples of ``unit`` between two bounds."""

    least: Count = 1
    most: Count = 1
    unit: Count = 1


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that a job may have. What the user has fixed has one value."""

    workers: Range = Range()
    """Worker nodes."""
    servers: Range = Range()
    """Servers; only in a parameter-server job."""
    worker_cpu: tuple[Positive, ...] = ()
    """Allowed cores of a worker node; empty: unchanged."""
    server_cpu: tuple[Positive, ...] = ()


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a job, and of the resources that it may have."""

    name: Text
    strategy: Strategy = "all-reduce"
    mode: Mode = "single-job"
    """What chooses its size: its user, the job alone, or the Brain for the whole cluster."""
    optimizer: Text = ""
    """Name of the optimizer that plans it; empty: the built-in one of its mode."""
    features: Annotated[dict[str, str | float], Meta(max_length=100)] = {}
    """Features by which similar past jobs are found: user, model, parameters, batch, dataset."""
    space: Space = Space()
    groups: dict[str, NodeGroup] = {}
    """Resources of each node, by kind, as the user set them; 0 if left open. Counts are in ``space``."""
    queue: Text = ""
    """Queue whose quota it counts against; empty: none."""
    priority: Positive = 1.0
    total: Amount = 0.0
    """Samples until its end; 0 if unknown."""
    restart: Amount = 30.0
    """Seconds without progress after a change of its size."""
    origin: Text = ""
    """Id of the object from which the job was made, such as the uid of an ElasticJob; empty: none."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Measured throughput of a size."""

    shape: Shape
    throughput: Positive
    """Samples per second of all workers."""
    compute_seconds: Positive | None = None
    """Seconds of one pass without the exchange of gradients; None if not measured."""
    batches: Batches | None = None
    """Global batches that the job allows; None: each worker's batch is fixed."""
    done: Amount = 0.0
    """Samples that the job has processed so far; 0 if unknown."""
    at: Amount = 0.0
    """Seconds since the epoch; 0 or a time to come: when the Brain receives it."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Resource usage of a job's node."""

    node: Id
    """Name such as ``worker-0`` or ``ps-1``; it lasts for the life of the job."""
    kind: Id = "worker"
    cpu: Amount = 0.0
    """Cores in use."""
    memory: Amount = 0.0
    """Bytes in use."""
    accelerator: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of time in which its accelerators compute."""
    progress: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Progress of the job."""
    at: Amount = 0.0
    """Seconds since the epoch; 0 or a time to come: when the Brain receives it."""


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the cluster."""

    name: Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[!-~]+$")]
    capacity: Use
    used: Use = {}
    """Resources requested on it by everything that runs there."""
    by_jobs: Use = {}
    """Part of ``used`` that nodes of jobs request."""
    ready: bool = True
    """True if new nodes can be placed on it."""


# ---- requests


class RegisterJob(msgspec.Struct, frozen=True, kw_only=True, tag="register"):
    """Registration of a job. A restarted master repeats it; the last description holds."""

    request: Id
    job: Id
    description: Description


class ReportSamples(msgspec.Struct, frozen=True, kw_only=True, tag="samples"):
    """Report of throughputs that a job has measured."""

    request: Id
    job: Id
    samples: Annotated[tuple[Sample, ...], Meta(min_length=1, max_length=1000)]


class ReportUsage(msgspec.Struct, frozen=True, kw_only=True, tag="usage"):
    """Report of the resource usage of a job's nodes."""

    request: Id
    job: Id
    nodes: Annotated[tuple[Usage, ...], Meta(min_length=1, max_length=10_000)]


class ReportPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """Report of a plan that the job's master made itself."""

    request: Id
    job: Id
    plan_id: Id
    plan: ResourcePlan
    before: Shape | None = None


class ReportOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """Report of a plan's outcome."""

    request: Id
    job: Id
    plan_id: Id
    state: PlanState
    throughput: Amount = 0.0
    """Samples per second measured after the plan; 0 if not measured."""
    reason: Text = ""


class ReportEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Report of a job's end."""

    request: Id
    job: Id
    state: JobState
    reason: Text = ""
    shape: Shape | None = None
    """Its last size; None: the shape of its last sample."""
    outcome: Outcome | None = None
    """Its end as its master saw it, with its goodput and incidents; None: not known."""


class ReportCluster(msgspec.Struct, frozen=True, kw_only=True, tag="cluster"):
    """Report of all current machines of the cluster; the Brain forgets any others."""

    request: Id
    nodes: Annotated[tuple[ClusterNode, ...], Meta(max_length=20_000)]


class SetQuota(msgspec.Struct, frozen=True, kw_only=True, tag="quota"):
    """Joint limits of the jobs of a queue; without limits the queue's quota is removed."""

    request: Id
    queue: Id
    limits: Use


Report: TypeAlias = (
    RegisterJob
    | ReportSamples
    | ReportUsage
    | ReportPlan
    | ReportOutcome
    | ReportEnd
    | ReportCluster
    | SetQuota
)


class Committed(msgspec.Struct, frozen=True):
    """Confirmation that the report is in the database."""


class AskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the job's next plan. A repeated request gets the same plan again."""

    request: Id
    job: Id
    current: Shape | None = None
    """Current size; None if nothing runs yet."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `AskPlan`."""

    reason: str
    """One sentence, also without a plan."""
    plan: ResourcePlan | None = None
    """None: the job stays as it is."""
    plan_id: str = ""
    """Id for the report of the outcome; empty without a plan."""
    optimizer: str = ""


class AskEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the expected effect of other numbers of nodes on a job."""

    job: JobName
    workers: Count
    servers: Count | None = None
    """None: as many as it has."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `AskEffect`."""

    shape: Shape
    before: Shape
    plan: ResourcePlan
    """The size as a plan, with its effect; asking changes nothing."""
    inside: bool
    """True if the size is near enough to measured ones that a plan may use it."""


class AskSimilar(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the measurements of the most similar past job."""

    job: JobName


class Similar(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `AskSimilar`: a job that ended well."""

    name: str = ""
    """Empty: no job is similar enough."""
    similarity: float = 0.0
    """Similarity from 0 to 1."""
    samples: tuple[Sample, ...] = ()
    """The latest samples, oldest first."""


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
    """Its size in its last sample, or at its end."""
    throughput: float = 0.0
    """Throughput of its last sample."""


class AskJobs(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the jobs that the Brain knows, latest first."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    running: bool = False
    """True: only jobs that have not ended."""
    origin: Text = ""
    """Only jobs of this origin; empty: of any."""


class Jobs(msgspec.Struct, frozen=True):
    """The answer to `AskJobs`."""

    jobs: tuple[JobRow, ...]


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and its outcome."""

    plan_id: str
    at: float
    """Seconds since the epoch."""
    optimizer: str
    """Optimizer that made it; ``master``: the job's own master."""
    plan: ResourcePlan
    before: Shape | None = None
    state: PlanState | None = None
    """None: no outcome has been reported yet."""
    measured: float = 0.0
    """Samples per second; 0 if not measured."""
    error: float | None = None
    """Relative difference of the measured throughput from the predicted one."""
    within: bool | None = None
    """True if it lies in the predicted interval."""
    reason: str = ""
    """The explanation of the outcome by the job's master."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Resource usage of a job's node."""

    node: str
    kind: str
    heard: float
    """Time of the last report, seconds since the epoch."""
    cpu: float
    """Cores, latest and largest."""
    most_cpu: float
    memory: float
    """Bytes, latest and largest."""
    most_memory: float
    accelerator: float


class Explain(msgspec.Struct, frozen=True):
    """Request for everything known about a job."""

    job: JobName


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the Brain knows about a job."""

    job: JobRow
    plans: tuple[PlanRecord, ...]
    """The last 100, oldest first."""
    nodes: tuple[NodeRecord, ...]
    samples: tuple[Sample, ...]
    """The last 200, oldest first."""
    outcome: Outcome | None = None
    """Its end as its master reported it; None: it runs, or its master did not report that."""


class AskCluster(msgspec.Struct, frozen=True):
    """Request for the resources of the cluster."""


class ClusterResources(msgspec.Struct, frozen=True, kw_only=True):
    """Resources of the cluster; empty if none were reported."""

    nodes: tuple[ClusterNode, ...] = ()
    seen: float = 0.0
    """Time of the report, seconds since the epoch."""
    capacity: Use = {}
    """Capacity of the machines that are ready."""
    free: Use = {}
    quotas: dict[str, Use] = {}
    """Quotas by queue."""


class AskDivision(msgspec.Struct, frozen=True):
    """Request for the current division of the cluster among its jobs."""


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `AskDivision`: advice for each job whose mode is ``cluster``."""

    advice: dict[str, Advice]
    seconds: float
    """Duration of the computation."""
