"""How fast a job trains: what is measured of it, and what is done about it."""

from __future__ import annotations

import enum

import msgspec

from dlrover.spec.batches import Batches
from dlrover.spec.plan import Plan
from dlrover.spec.roles import Size


class SpeedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One window of steady training. Times are seconds."""

    nodes: int
    """Of role worker."""
    replicas: int
    """Workers of the world."""
    step_seconds: float
    """Of one optimizer step, without evaluation, checkpoints and compiling. With parameter servers, whose workers
    do not wait for each other, the harmonic mean over the workers."""
    steps: int
    """In the window."""
    compute_seconds: float | None = None
    """What a worker takes without waiting for the others, the median; None where nobody measured it."""
    total_batch: int = 0
    """Samples of a step of all workers, where it is fixed; 0: each worker has a batch of its own size."""
    batches: Batches | None = None
    """Which global batches the program allows; None: it stays."""
    servers: int = 0
    """Nodes of role ps."""
    worker_cpu: float = 0.0
    """Cores of each worker's node, the mean; 0 where nobody knows them."""
    server_cpu: float = 0.0
    """Cores of each server's node, the mean; 0 where nobody knows them."""

    @property
    def size(self) -> Size:
        """What a plan can change."""
        return Size(self.nodes, self.servers)

    def cost(self, size: Size) -> float:
        """Of a size in worker nodes: a server counts by its share of their cores, or as one if nobody knows them."""
        known = self.worker_cpu > 0 and self.server_cpu > 0
        return size.workers + size.servers * (self.server_cpu / self.worker_cpu if known else 1.0)

    @property
    def throughput(self) -> float:
        """In `unit`."""
        return (self.total_batch or self.replicas) / self.step_seconds

    @property
    def unit(self) -> str:
        """Samples per second where their number is known; else steps per second, summed over the workers."""
        return "samples/s" if self.total_batch else "worker steps/s"


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's optimizer holds, after its first step."""

    parameters: int = 0
    """Numbers that are trained."""
    parameter_bytes: int = 0
    state_bytes: int = 0
    """What the optimizer keeps beside them."""


class ScaleKind(str, enum.Enum):
    """Why a job's size is changed. The value is what users see."""

    GROW = "more nodes"
    """The model expects that more nodes pay."""
    SHRINK = "fewer nodes"
    """The model expects that they do not."""
    MEASURE = "measure"
    """Nobody knows; it is tried."""
    REPLACE = "another node"
    """A slow one holds up the others."""
    MIGRATE = "other servers"
    """Hot servers move to nodes with more cores."""
    REBALANCE = "even load"
    """The parameters lie unevenly on the servers: the program divides them anew."""
    BATCH = "another batch"
    """Steps of other sizes make more progress in the same time."""
    RETURN = "roll back"
    """What was tried fell short."""


class ScaleStage(str, enum.Enum):
    """How far the search for the best size is. The value is what users see."""

    START = "start"
    """The first size has not been measured yet."""
    ADJUST = "initial adjustment"
    """Sizes are tried, one after the other."""
    RUNNING = "running"
    """The best size is known; it is looked at now and then."""


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A wanted number of nodes."""

    kind: ScaleKind
    nodes: int
    servers: int = 0
    batch: int = 0
    """Samples of a step of all workers that the job shall have; 0: as many as it has."""
    plan: Plan
    plan_id: str = ""
    """The Brain's name for it, if it has made the plan. It weighs jobs against each other, so a job does not take
    back what it has ordered."""

    @property
    def size(self) -> Size:
        """What the job shall have."""
        return Size(self.nodes, self.servers)
