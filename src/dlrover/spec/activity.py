"""Activities of a worker, as numbers. Workers load this module, so it uses only the standard library."""

from __future__ import annotations

import enum


class Activity(enum.IntEnum):
    """Activity of a worker; exactly one at any moment."""

    START = 0
    """From process start to the first optimizer step: imports, set-up, loading."""
    STEP = 1
    """Training steps."""
    DATA = 2
    """Waiting for the next batch."""
    COMPILE = 3
    """Compiling a model."""
    EVAL = 4
    """Evaluation."""
    CHECKPOINT = 5
    """Blocked by saving or loading a checkpoint, after the first step."""
