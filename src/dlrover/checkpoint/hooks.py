"""Hooks by which the launcher of this process observes checkpoints; they do nothing by default."""

from __future__ import annotations

import contextlib
from collections.abc import Callable


def _ignore(_step: int) -> None:
    pass


blocked: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
"""Returns a context that is entered while the training waits for a checkpoint."""
loaded: Callable[[int], None] = _ignore
"""Called with the number of the step that the training continues from; 0 for a fresh start."""
saving: Callable[[int], None] = _ignore
"""Called with the number of each step that is saved."""
