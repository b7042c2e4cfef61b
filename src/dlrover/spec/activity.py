"""What a worker spends its time on, as its node's agent reads it from the progress board."""

from __future__ import annotations

import enum

import msgspec


class Activity(enum.IntEnum):
    """What a worker does. At any moment it does one of these."""

    START = 0
    """From the start of its process to its first optimizer step: imports, set-up, loading."""
    STEP = 1
    """Training steps."""
    DATA = 2
    """Waiting for the next batch."""
    COMPILE = 3
    """Compiling a model."""
    EVAL = 4
    """Evaluation."""
    CHECKPOINT = 5
    """Blocked by saving or loading a checkpoint, once the first step was made."""


class WorkerActivity(msgspec.Struct, frozen=True, array_like=True):
    """One worker's record. Times are seconds since its process began, as long as it lasts."""

    steps: int
    """Optimizer steps that it has completed."""
    doing: int
    """An `Activity`."""
    since: float
    """How long it has been doing that."""
    seconds: tuple[float, ...]
    """How long it has been doing each `Activity` in all; the sum is the worker's age."""
    compute: float = 0.0
    """Seconds of its steps that it did not wait for other ranks."""
    first_step: int = -1
    """The number of the step that it began with, -1 while that is not known."""


def mean(workers: tuple[WorkerActivity, ...]) -> tuple[float, ...]:
    """Seconds by `Activity`, the mean over ``workers``; empty without workers."""
    if not workers:
        return ()
    return tuple(
        sum(worker.seconds[kind] for worker in workers) / len(workers) for kind in Activity
    )
