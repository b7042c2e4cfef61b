"""Measurements of a running job: its workers' time, batches and speed, and its nodes' resources."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover.spec.activity import Activity
from dlrover.spec.node import Size
from dlrover.spec.numbers import Count, KnownCount

Samples = Annotated[int, Meta(ge=1, le=2**40)]
Norm = Annotated[float, Meta(ge=0, le=1e300)]


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """Allowed range of a job's global batch: the samples of one optimizer step over all workers."""

    least: Samples
    """The program's own global batch."""
    most: Samples
    """Largest global batch; equals ``least`` if the global batch is fixed."""
    pass_most: Samples
    """Maximum number of samples in one pass of a worker."""
    square: Norm = 0.0
    """Squared norm of the mean gradient; 0: not measured."""
    variance: Norm = 0.0
    """Variance of a single sample's gradient, summed over the parameters; 0: not measured."""


class WorkerActivity(msgspec.Struct, frozen=True, array_like=True):
    """Activity of one worker. Times are durations in seconds within the life of its process."""

    steps: Count
    """Completed optimizer steps."""
    doing: Annotated[int, Meta(ge=0, lt=len(Activity))]
    """The current `Activity`."""
    since: float
    """Duration of the current activity; each step counts by itself."""
    seconds: Annotated[tuple[float, ...], Meta(min_length=len(Activity), max_length=len(Activity))]
    """Total duration of each `Activity`; the sum is the worker's age."""
    compute: float = 0.0
    """Part of the time in steps that was not spent waiting for other ranks."""
    first_step: KnownCount = -1
    """Number of the step that the worker began with; -1 while unknown."""
    ended: bool = False
    """True if the process has ended; its times no longer change."""
    total_batch: Count = 0
    """Samples per step of all ranks, if the program keeps that fixed; otherwise 0."""
    parameters: Count = 0
    """Number of scalar parameters that the optimizer trains."""
    parameter_bytes: Count = 0
    state_bytes: Count = 0
    """Bytes of optimizer state beside the parameters, after the first step."""
    left: KnownCount = -1
    """Optimizer steps left until the training ends; -1 while unknown."""
    batches: Batches | None = None
    """Allowed global batches; None: the global batch is fixed."""


class NodeUsage(msgspec.Struct, frozen=True):
    """One measurement of a node."""

    cpu: float
    """Cores kept busy since the last measurement by the control group or container of the node, or by the
    node's workers and their children if it shares that group."""
    memory: Count
    """Bytes in use that cannot be reclaimed: of the node's control group or container, or of the machine if
    there is none."""
    limit: Count
    """Available bytes; 0 if unknown."""
    cores: float = 0.0
    """Cores that the node may keep busy; 0 if unknown."""
    busy: float = -1.0
    """Mean share of time in which its accelerators work, 0 to 1; -1 if there are none or none reports it."""


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
