"""The optimizer whose steps are those of the training, where a program has several."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

OTHERS = 10
"""Steps of other optimizers in a row after which the training is theirs, unless more were usual."""


class CountedOptimizer:
    """The first optimizer that steps, until the program has gone over to another one, as if it trains several models in turn.

    It is not kept in memory. What counts follows from the order of steps alone, so that all ranks count alike.
    """

    def __init__(self) -> None:
        self.now: Callable[[], Any] | None = None
        """Returns the optimizer, None if the program has left it."""
        self._others = self._usual = 0
        """Steps of others since its last one, and at most between two of its steps."""

    def counts(self, optimizer: Any) -> bool:
        """Return whether a step of this optimizer counts."""
        if self.now is not None and self.now() is optimizer:
            self._usual, self._others = max(self._usual, self._others), 0
            return True
        self._others += 1
        if self.now is not None and self._others <= max(OTHERS, 2 * self._usual):
            return False
        self.now = weakref.ref(optimizer)
        self._others = self._usual = 0
        return True
