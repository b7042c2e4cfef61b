"""Training speed of a job: measurements, and decisions that follow from them."""

from __future__ import annotations

import enum

import msgspec

from dlrover.spec.batches import Batches
from dlrover.spec.plan import Plan
from dlrover.spec.roles import Size


class SpeedSample(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement of one window of steady training. Times are seconds."""

    nodes: int
    """Nodes of role worker."""
    replicas: int
    """Workers of the world."""
    step_seconds: float
    """Time of one optimizer step, without evaluation, checkpoints and compiling. With parameter servers,
    whose workers do not wait for each other, the harmonic mean over the workers."""
    steps: int
    """Steps in the window."""
    compute_seconds: float | None = None
    """Median time per step of a worker without waiting for the others; None if not measured."""
    total_batch: int = 0
    """Samples per step of all workers, if fixed; 0: each worker has a batch of its own size."""
    batches: Batches | None = None
    """Global batches that the program allows; None: the global batch is fixed."""
    servers: int = 0
    """Nodes of role ps."""
    worker_cpu: float = 0.0
    """Mean number of cores of a worker's node; 0 if unknown."""
    server_cpu: float = 0.0
    """Mean number of cores of a server's node; 0 if unknown."""

    @property
    def size(self) -> Size:
        """The part of the sample that a plan can change."""
        return Size(self.nodes, self.servers)

    def cost(self, size: Size) -> float:
        """Return a size's cost in worker nodes; a server counts by its share of cores, or 1 if unknown."""
        known = self.worker_cpu > 0 and self.server_cpu > 0
        return size.workers + size.servers * (self.server_cpu / self.worker_cpu if known else 1.0)

    @property
    def throughput(self) -> float:
        """Throughput in `unit`."""
        return (self.total_batch or self.replicas) / self.step_seconds

    @property
    def unit(self) -> str:
        """Samples per second if their number is known; else steps per second, summed over the workers."""
        return "samples/s" if self.total_batch else "worker steps/s"


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one worker's optimizer, after its first step."""

    parameters: int = 0
    """Number of trained scalar parameters."""
    parameter_bytes: int = 0
    state_bytes: int = 0
    """Bytes of optimizer state beside the parameters."""


class ScaleKind(str, enum.Enum):
    """Reason for a change of a job's size. Users see the value."""

    GROW = "more nodes"
    """The model expects that more nodes pay off."""
    SHRINK = "fewer nodes"
    """The model expects that fewer nodes pay off."""
    MEASURE = "measure"
    """The effect is unknown; it is tried."""
    REPLACE = "another node"
    """A slow node holds up the others."""
    MIGRATE = "other servers"
    """Hot servers move to nodes with more cores."""
    REBALANCE = "even load"
    """The parameters are unevenly distributed over the servers; the program redistributes them."""
    BATCH = "another batch"
    """Steps of another size make more progress in the same time."""
    RETURN = "roll back"
    """The tried change fell short."""


class ScaleStage(str, enum.Enum):
    """Stage of the search for the best size. Users see the value."""

    START = "start"
    """The first size has not been measured yet."""
    ADJUST = "initial adjustment"
    """Sizes are tried, one after the other."""
    RUNNING = "running"
    """The best size is known; it is reviewed from time to time."""


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A wanted number of nodes."""

    kind: ScaleKind
    nodes: int
    servers: int = 0
    batch: int = 0
    """Wanted samples per step of all workers; 0: unchanged."""
    plan: Plan
    plan_id: str = ""
    """The Brain's id of the plan, if the Brain made it. The Brain weighs jobs against each other, so a job
    does not roll back such a plan."""

    @property
    def size(self) -> Size:
        """Wanted size of the job."""
        return Size(self.nodes, self.servers)
