"""The progress board: one page per node in which each worker keeps its step count.

A worker writes its own slot, its agent reads all of them; nobody waits for anybody. A slot is four
64-bit integers: steps completed, time of the first and of the latest step (nanoseconds since the epoch),
and a flag that the worker has written the list of its imported modules. Each is stored by a single
aligned write.
"""

from __future__ import annotations

import mmap
import time
from typing import NamedTuple

SLOT_WORDS = 4
WORD_BYTES = 8
MAX_SLOTS = mmap.PAGESIZE // (SLOT_WORDS * WORD_BYTES)
"""Workers that one page has room for."""


class Slot(NamedTuple):
    """One worker's progress. Times are seconds since the epoch, 0.0 before the first step."""

    steps: int
    first_step: float
    last_step: float
    modules_listed: bool


class Board:
    """The page behind a file descriptor that agent, zygote and workers share."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        self._words = memoryview(self._map).cast("Q")

    def clear(self) -> None:
        """Forget the last round's progress."""
        for word in range(len(self._words)):
            self._words[word] = 0

    def read(self, slot: int) -> Slot:
        """What the worker of ``slot`` has written."""
        steps, first, last, listed = self._words[slot * SLOT_WORDS : (slot + 1) * SLOT_WORDS]
        return Slot(steps, first / 1e9, last / 1e9, bool(listed))

    def count_step(self, slot: int) -> int:
        """Add one step; the number of steps completed."""
        base = slot * SLOT_WORDS
        now = time.time_ns()
        steps = self._words[base] + 1
        self._words[base + 2] = now
        if steps == 1:
            self._words[base + 1] = now
        self._words[base] = steps
        return steps

    def mark_modules_listed(self, slot: int) -> None:
        """Tell the agent that this worker has written its list of modules."""
        self._words[slot * SLOT_WORDS + 3] = 1
