"""The micro-batch tuner: fits the micro-batch to the device memory during training."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from dlrover.planning import tuning

logger = logging.getLogger(__name__)

STEPS = 20
"""Optimizer steps per window, between two decisions."""


class DeviceMemory:
    """PyTorch's memory counters of the device that this process trains on."""

    def __init__(self) -> None:
        self.device = str(_accelerator() or "cpu")
        # The counters are new in PyTorch 2.9, and not every vendor's device supports them.
        counts = self.device != "cpu" and hasattr(torch.accelerator, "get_memory_info")
        self._counters = torch.accelerator if counts else None
        self._peaks: dict[int, int] = {}

    def begin(self) -> None:
        """Start a new measurement of the peak."""
        if self._counters is None:
            return
        try:
            self._counters.reset_peak_memory_stats()
        except (NotImplementedError, RuntimeError):
            self._counters = None

    def measured(self, size: int) -> tuning.Memory | None:
        """Return the memory used with micro-batches of ``size``, between steps; None without counters."""
        if self._counters is None:
            return None
        self._peaks[size] = max(self._peaks.get(size, 0), self._counters.max_memory_allocated())
        free, _ = self._counters.get_memory_info()
        limit = free + self._counters.memory_reserved()
        return tuning.Memory(dict(self._peaks), self._counters.memory_allocated(), limit)


class MicroBatchTuner:
    """The chooser of the micro-batch size; decides every `STEPS` steps, on all ranks together.

    Each rank measures, and all take the smallest size that any rank wants, so all make equally many passes
    per step. A new size applies from the first global batch that no rank's loader has requested.

    Args:
        now: current samples per pass of a rank.
        most: a rank's part of the global batch.
        group: process group of the ranks that share the global batch; None: all ranks.
        memory: source of measurements; None: `DeviceMemory`.
    """

    def __init__(self, now: int, most: int, group: Any = None, memory: Any = None) -> None:
        self._now, self._most, self._group = now, most, group
        self._since = 0, 0
        self._memory = memory or DeviceMemory()
        self._steps = 0
        self._settled = False

    def step(
        self, taken_to: tuple[int, int], handed_out_to: tuple[int, int]
    ) -> tuple[int, tuple[int, int]] | None:
        """Count a step, and perhaps choose a new size; collective.

        Args:
            taken_to: epoch and position up to which all ranks together have trained.
            handed_out_to: epoch and position up to which this rank's loader has requested batches.

        Returns:
            A new size, and the epoch and position from which it applies; None: no change.
        """
        if self._settled or taken_to < self._since:
            return None
        self._steps += 1
        if self._steps % STEPS == 1:
            self._memory.begin()
        if self._steps % STEPS:
            return None
        memory = self._memory.measured(self._now)
        choice = tuning.micro_batch(self._now, self._most, memory, self._memory.device)
        size, since = self._agreed(choice.value, handed_out_to)
        self._settled = size == self._now
        joined = dist.is_available() and dist.is_initialized()
        if not joined or dist.get_rank() == 0:
            self._tell(size, choice)
        if self._settled:
            return None
        self._now, self._since = size, since
        return size, since

    def _agreed(self, size: int, position: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        """Return the smallest size and the latest position of all ranks."""
        if not dist.is_available() or not dist.is_initialized():
            return size, position
        device = _accelerator() or "cpu"
        epoch, at = position
        least = torch.tensor([size, -epoch], dtype=torch.int64, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        size, latest = int(least[0]), -int(least[1])
        furthest = torch.tensor([at if epoch == latest else 0], dtype=torch.int64, device=device)
        dist.all_reduce(furthest, dist.ReduceOp.MAX, group=self._group)
        return size, (latest, int(furthest[0]))

    def _tell(self, size: int, choice: tuning.Choice) -> None:
        if size == self._now:
            what = choice.reason if choice.value == size else "another rank has no room for more"
            logger.warning("The micro-batch stays at %d samples: %s.", size, what)
        else:
            logger.warning(
                "The micro-batch has %d samples from now on, %d until now: %s.",
                size, self._now, choice.reason,
            )  # fmt: skip


def _accelerator() -> str | None:
    """Return the type of the accelerator that this process trains on; None without one."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else None
