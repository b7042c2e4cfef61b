"""What a worker spends its time on, as its node's agent reads it from the progress board."""

from __future__ import annotations

import msgspec

from dlrover.spec.activities import Activity
from dlrover.spec.batches import Batches


class WorkerActivity(msgspec.Struct, frozen=True, array_like=True):
    """One worker's record. Times are seconds since its process began, as long as it lasts."""

    steps: int
    """Optimizer steps that it has completed."""
    doing: int
    """An `Activity`."""
    since: float
    """How long it has been doing that; steps count one by one."""
    seconds: tuple[float, ...]
    """How long it has been doing each `Activity` in all; the sum is the worker's age."""
    compute: float = 0.0
    """Seconds of its steps that it did not wait for other ranks."""
    first_step: int = -1
    """The number of the step that it began with, -1 while that is not known."""
    ended: bool = False
    """Its process has ended; the times stand still."""
    total_batch: int = 0
    """Samples of a step of all ranks, where the program keeps that fixed; 0 otherwise."""
    parameters: int = 0
    """Numbers that its optimizer trains."""
    parameter_bytes: int = 0
    state_bytes: int = 0
    """Bytes that its optimizer keeps beside them, after the first step."""
    left: int = -1
    """Optimizer steps that are left to the end of the training, -1 while that is not known."""
    batches: Batches | None = None
    """Which global batches it allows; None: it stays."""


def mean(workers: tuple[WorkerActivity, ...]) -> tuple[float, ...]:
    """Seconds by `Activity`, the mean over ``workers``; empty without workers."""
    if not workers:
        return ()
    return tuple(
        sum(worker.seconds[kind] for worker in workers) / len(workers) for kind in Activity
    )
