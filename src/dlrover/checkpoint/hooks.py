"""What the launcher of this process wants to know of checkpoints. Nothing, unless it says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable


def _ignore(_step: int) -> None:
    pass


blocked: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
"""Entered while the training waits for a checkpoint."""
loaded: Callable[[int], None] = _ignore
"""Called with the number of the step that the training goes on from: 0 for a fresh start."""
saving: Callable[[int], None] = _ignore
"""Called with the number of each step that is saved."""
