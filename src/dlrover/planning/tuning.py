"""Decisions that tune a running training: from measurements to the next setting and its reason.

The module measures and changes nothing itself. A *window* is a part of the training with one setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

TOLERATED = 0.05
"""Accepted fraction of the time that the training waits for data."""
WORTH = 0.05
"""Minimum reduction of the time per batch that justifies more processes, as a fraction."""
GROWTH = 4
"""Maximum growth factor of a setting per window; forecasts far ahead are unreliable."""
RESERVE = 0.1
"""Fraction of the memory that stays free, for uses that no window has seen."""
BATCH_GROWTH = 2
"""Maximum growth factor of a micro-batch per window; a wrong forecast would end the training."""


class Choice(NamedTuple):
    """A decision: the next setting and its reason."""

    value: int
    reason: str
    """Reason for the setting, in words."""


class Window(NamedTuple):
    """Measurements of a loader in a window."""

    waited: float
    """Seconds that the training waited for batches."""
    elapsed: float
    """Seconds for all batches, including the training between them."""
    batches: int


@dataclass
class ReaderChoice:
    """The choice of the number of reader processes; `handle` takes a window and returns the next number.

    With n processes, reading a batch takes n times as long as the loader's time per batch. The number needed
    is the ratio of the reading time to the training time. If the time per batch does not fall with more
    processes, something else is the bottleneck (a disk, the processors): the smaller number stays.
    """

    count: int
    """Current number of processes; 0: the training process reads."""
    most: int
    """Maximum number of processes."""
    before: tuple[int, float] | None = None
    """Previous number and its seconds per batch; None: no comparison is due."""
    settled: bool = False
    """True if a larger number was tried and was no faster."""

    def handle(self, window: Window) -> Choice:
        """Return the number of processes for the next window."""
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
    """Measurements of a device's memory, in bytes."""

    peaks: Mapping[int, int]
    """Peak memory in use, by size of the micro-batch."""
    base: int
    """Memory in use between two steps: parameters and optimizer state."""
    limit: int
    """Memory available to this process."""


def micro_batch(now: int, most: int, memory: Memory | None, device: str) -> Choice:
    """Choose the samples that a rank computes at once.

    Memory grows by the same number of bytes with each sample. Two measured sizes give this number. After only
    one size, the memory above ``base`` counts, which is too much, because it includes the gradients.

    Args:
        now: micro-batch size of the newest peak.
        most: a rank's part of the global batch.
        memory: measurements; None: the device has no memory counters.
        device: name of the device, for the reason.
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
    """Return the bytes per sample, and the bytes in use without any sample."""
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
