"""The balancer: gives slower ranks smaller shares of the global batch during training."""

from __future__ import annotations

import logging
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrover.errors import ConfigurationError
from dlrover.training.shares import Shares
from dlrover.training.worker import tracker
from dlrover.training.worker.compute import ComputeTime

logger = logging.getLogger(__name__)

STEPS = 20
"""Optimizer steps per window, between two decisions."""

Position = tuple[int, int]
"""An epoch and a position in it, in samples."""


class Balancer:
    """The chooser of the ranks' shares of the global batch; decides every `STEPS` steps, on all ranks.

    The ranks exchange their compute times, and each derives the same shares from them. New shares apply from
    the first global batch that no rank's loader has requested.

    Args:
        model: model whose gradients the ranks average.
        optimizer: the model's optimizer.
        group: process group of the ranks that share the global batch.
        batch_size: samples of a global batch.

    Raises:
        ConfigurationError: the model's ranks also wait for each other within a pass.
    """

    def __init__(self, model: nn.Module, optimizer: Any, group: Any, batch_size: int) -> None:
        _check(model)
        self._optimizer, self._group = optimizer, group
        self._rank, self._replicas = dist.get_rank(group), dist.get_world_size(group)
        self._device = next(model.parameters()).device
        self._shares = Shares(batch_size, self._replicas)
        self._own = _OwnTime()
        self._compute = ComputeTime(self._own)
        self._since: Position = 0, 0

    def step(
        self, taken_to: Position, handed_out_to: Position
    ) -> tuple[tuple[int, ...], Position] | None:
        """Count a step, and perhaps choose new shares; collective.

        Args:
            taken_to: position up to which all ranks together have trained.
            handed_out_to: position up to which this rank's loader has requested batches.

        Returns:
            New shares and the position from which they apply; None: no change.
        """
        self._compute.step(self._optimizer, time.monotonic_ns())
        if taken_to < self._since:
            self._own.begin()
            return None
        self._own.made += 1
        if self._own.made < STEPS:
            return None
        rows = self._exchanged(self._own.usual(), handed_out_to)
        self._own.begin()
        if not all(nanoseconds for nanoseconds, _, _ in rows):
            return None
        change = self._shares.decide([nanoseconds / 1e9 for nanoseconds, _, _ in rows])
        if not change:
            return None
        if self._rank == 0:
            logger.warning("The shares of the batch change: %s.", change)
        self._since = max((epoch, at) for _, epoch, at in rows)
        return self._shares.now, self._since

    def _exchanged(self, nanoseconds: int, position: Position) -> list[tuple[int, int, int]]:
        """Return each rank's time for a step, in nanoseconds, with its position."""
        rows = torch.zeros(self._replicas, 3, dtype=torch.int64, device=self._device)
        rows[self._rank] = torch.tensor([nanoseconds, *position], device=self._device)
        dist.all_reduce(rows, group=self._group)
        return [(row[0], row[1], row[2]) for row in rows.tolist()]


class _OwnTime:
    """Compute times of a window's steps, without waiting for other ranks."""

    def __init__(self) -> None:
        self.made = 0
        self._total = 0
        self._steps: list[int] = []

    @property
    def apart(self) -> int:
        return tracker.apart()

    def computed(self, nanoseconds: int) -> None:
        self._steps.append(nanoseconds - self._total)
        self._total = nanoseconds

    def begin(self) -> None:
        self.made = 0
        self._steps.clear()

    def usual(self) -> int:
        """Return the nanoseconds of the median step; 0 if none was measured."""
        return round(median(self._steps)) if self._steps else 0


def _check(model: nn.Module) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - slow to import

    waits = FullyShardedDataParallel, nn.SyncBatchNorm
    for module in model.modules():
        if isinstance(module, waits) or hasattr(module, "set_requires_gradient_sync"):
            raise ConfigurationError(
                f"balance does not go with {type(module).__name__}: its ranks wait for each other within a pass,"
                " so none computes ahead; it takes DistributedDataParallel without synchronised normalisation."
            )
