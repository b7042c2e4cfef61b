"""What to change while a training runs: measured numbers in, the next setting and a reason out.

Nothing here measures or changes anything. A *window* is a piece of the training with one setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

TOLERATED = 0.05
"""Share of the time that the training may wait for data."""
WORTH = 0.05
"""Share of the time for a batch that more processes must save, or they are taken back."""
GROWTH = 4
"""A setting grows by this factor in one window, at most; a forecast from far away is a poor one."""
RESERVE = 0.1
"""Share of the memory that stays free, for what no window has seen."""
BATCH_GROWTH = 2
"""The same as `GROWTH`, for a micro-batch: what it forecasts wrongly ends the training."""


class Choice(NamedTuple):
    """The next setting."""

    value: int
    reason: str
    """A sentence."""


class Window(NamedTuple):
    """What a loader was measured to do."""

    waited: float
    """Seconds that the training waited for batches."""
    elapsed: float
    """Seconds that the batches took, with the training between them."""
    batches: int


@dataclass
class Readers:
    """How many processes read. `handle` takes in a window and says how many read in the next.

    With n processes, a batch takes n times as long to read as the loader needs for each. So many more than
    that are needed as the reading takes longer than the training does. If the time for a batch does not fall
    with them, something else is slow (a disk, the processors): the smaller number is best, and stays.
    """

    count: int
    """Processes now; 0: the training process reads."""
    most: int
    """Processes that there may be."""
    before: tuple[int, float] | None = None
    """The last number, and the seconds for a batch that it needed; None: nothing to compare with."""
    settled: bool = False
    """The best number was found by trying one that was no better."""

    def handle(self, window: Window) -> Choice:
        """The number of processes for the next window."""
        batch = window.elapsed / window.batches
        share = window.waited / window.elapsed
        if self.before is not None and batch > (1 - WORTH) * self.before[1]:
            count, last = self.before
            self.settled, self.before = True, None
            return self._choose(
                count,
                f"a batch takes {_ms(batch)} with {self.count}, and took {_ms(last)} with {count}",
            )
        self.before = None
        waits = f"the training waits for data in {share:.0%} of the time"
        if share <= TOLERATED:
            return Choice(self.count, f"{waits}, and {TOLERATED:.0%} is accepted")
        if self.settled:
            return Choice(self.count, f"{waits}; more processes were no faster")
        if self.count >= self.most:
            return Choice(self.count, f"{waits}; {self.most} processes is the most here")
        training = (window.elapsed - window.waited) / window.batches
        reading = window.waited / window.batches if self.count == 0 else self.count * batch
        needed = math.ceil(reading / training) if training > 0 else self.most
        count = min(max(needed, self.count + 1), GROWTH * max(1, self.count), self.most)
        self.before = self.count, batch
        return self._choose(
            count, f"{waits}: a batch takes {_ms(reading)} to read, and {_ms(training)} to train on"
        )

    def _choose(self, count: int, reason: str) -> Choice:
        self.count = count
        return Choice(count, reason)


class Memory(NamedTuple):
    """What was measured of a device's memory, in bytes."""

    peaks: Mapping[int, int]
    """The most that was in use, by size of the micro-batch."""
    base: int
    """In use between two steps: parameters, and the state of the optimizer."""
    limit: int
    """What there is for this process."""


def micro_batch(now: int, most: int, memory: Memory | None, device: str) -> Choice:
    """How many samples a rank computes at once.

    Memory grows by the same number of bytes with each sample. Two sizes give this number; after one size it
    is what lies above ``base``, which is too much, for the gradients are in it too.

    Args:
        now: the size that the newest peak belongs to.
        most: a rank's part of the global batch.
        memory: what was measured; None: the device has no such counters.
        device: its name, for the reason.
    """
    if memory is None:
        return Choice(now, f"the memory of activations cannot be measured on {device}")
    if now >= most:
        return Choice(now, f"{most} samples are all of this rank's part of the global batch")
    usable = int(memory.limit * (1 - RESERVE))
    sample, fixed = _line(memory, now)
    if sample <= 0:
        return Choice(now, "the memory in use does not grow with the micro-batch")
    fitting = int((usable - fixed) / sample)
    size = max(1, min(fitting, BATCH_GROWTH * now, most))
    reason = f"a sample takes {_mib(sample)}, and {_mib(usable)} can be used"
    return Choice(size if abs(size - now) * 10 >= now else now, reason)


def _line(memory: Memory, now: int) -> tuple[float, float]:
    """Bytes of a sample, and bytes that are there without any."""
    others = [size for size in memory.peaks if size != now]
    if not others:
        return (memory.peaks[now] - memory.base) / now, memory.base
    other = max(others, key=lambda size: abs(size - now))
    sample = (memory.peaks[now] - memory.peaks[other]) / (now - other)
    return sample, memory.peaks[now] - sample * now


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
