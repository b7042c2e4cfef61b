"""Time use of workers, as their node's agent reads it from the progress board."""

from __future__ import annotations

import msgspec

from dlrover.spec.batches import Batches


class WorkerActivity(msgspec.Struct, frozen=True, array_like=True):
    """Activity of one worker. Times are durations in seconds within the life of its process."""

    steps: int
    """Completed optimizer steps."""
    doing: int
    """The current `Activity`."""
    since: float
    """Duration of the current activity; each step counts by itself."""
    seconds: tuple[float, ...]
    """Total duration of each `Activity`; the sum is the worker's age."""
    compute: float = 0.0
    """Part of the time in steps that was not spent waiting for other ranks."""
    first_step: int = -1
    """Number of the step that the worker began with; -1 while unknown."""
    ended: bool = False
    """True if the process has ended; its times no longer change."""
    total_batch: int = 0
    """Samples per step of all ranks, if the program keeps that fixed; otherwise 0."""
    parameters: int = 0
    """Number of scalar parameters that the optimizer trains."""
    parameter_bytes: int = 0
    state_bytes: int = 0
    """Bytes of optimizer state beside the parameters, after the first step."""
    left: int = -1
    """Optimizer steps left until the training ends; -1 while unknown."""
    batches: Batches | None = None
    """Allowed global batches; None: the global batch is fixed."""
