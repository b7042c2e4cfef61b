"""The things that a worker does, as numbers. Only the standard library: this is loaded in workers."""

from __future__ import annotations

import enum


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
