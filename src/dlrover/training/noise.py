"""The gradient noise scale of McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1.

The expected squared norm of the mean gradient of b samples is ``square + variance / b``. So two batches of
different size determine both numbers. The small batch is one rank's part of the global batch, before the
ranks average their gradients; the large one is the global batch. A single rank's small batch is its first
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dlrover.errors import ConfigurationError
from dlrover.training.batch import MicroBatch

EVERY = 5
"""Steps from one measured step to the next; a measurement reads all gradients twice."""
MEASURED = 10
"""Measured steps between two exchanges among the ranks."""
KEPT = 0.8
"""Weight of the old mean at an exchange; below 1, because the noise grows in the course of a training."""


class Noise(NamedTuple):
    """The noise of the gradient."""

    square: float
    """Squared norm of the mean gradient."""
    variance: float
    """Variance of the gradient of one sample, summed over the parameters."""


class NoiseMeter:
    """A meter of the gradient noise during training; all ranks call it in the same steps.

    Args:
        model: model whose gradients are measured.
        group: process group of the ranks that share the global batch; None: all ranks.
        replicas: number of these ranks.
        scaler: ``GradScaler`` of the losses, if any.

    Raises:
        ConfigurationError: ranks have no gradient of their own, or no parameter requires gradients.
    """

    def __init__(self, model: nn.Module, group: Any, replicas: int, scaler: Any = None) -> None:
        _check(model)
        self._scaler = scaler
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise ConfigurationError(
                "max_global_batch_size needs a model with parameters that require gradients: their noise is measured."
            )
        self._device = self._parameters[0].device
        self._group, self._replicas = group, replicas
        self._steps = self._exchanges = 0
        self._hooks: list[Any] = []
        self._squared: Any = 0.0
        self._sums = self._zeros()
        self._mean = Noise(0.0, 0.0)

    def before_pass(self, micro_batches: Sequence[MicroBatch], number: int) -> None:
        """Prepare for the backward pass of one of this rank's micro-batches."""
        alone = self._replicas == 1
        small = 0 if alone else len(micro_batches) - 1  # the last pass of the small batch
        if self._steps % EVERY or number != small or (alone and len(micro_batches) == 1):
            return
        self._remove_hooks()  # left by a failed pass
        self._squared = 0.0
        # The ranks average a gradient after the hooks of its parameter have run.
        self._hooks = [p.register_post_accumulate_grad_hook(self._add) for p in self._parameters]

    def after_pass(self, micro_batches: Sequence[MicroBatch], number: int, size: int) -> None:
        """Read the gradients after a backward pass; ``size`` is the global batch's."""
        if self._steps % EVERY:
            return
        scale = self._scaler.get_scale() if self._scaler else 1.0
        if self._hooks:
            self._remove_hooks()
            taken = [part for part in micro_batches[: number + 1] if part.weight]
            if taken:
                weight = scale * sum(part.weight for part in taken)
                samples = sum(len(part.positions) for part in taken)
                self._sums[0] += self._squared / weight**2
                self._sums[1] += 1 / samples
                self._sums[2] += 1
        if number + 1 == len(micro_batches):
            for parameter in self._parameters:
                if parameter.grad is not None:
                    self._sums[3] += self._squared_norm(parameter) / scale**2
            self._sums[4] += 1 / size
            self._sums[5] += 1

    def step(self) -> Noise | None:
        """Count a step; return the noise if an exchange is due and gives a valid result; collective."""
        self._steps += 1
        if self._steps % (EVERY * MEASURED):
            return None
        sums, self._sums = self._sums, self._zeros()
        if self._replicas > 1:
            dist.all_reduce(sums, group=self._group)
        small, of_small, parts, large, of_large, wholes = sums.tolist()
        if not parts or not wholes or not math.isfinite(small + large):
            return None
        found = _noise(small / parts, of_small / parts, large / wholes, of_large / wholes)
        self._exchanges += 1
        kept = KEPT * (1 - KEPT ** (self._exchanges - 1)) / (1 - KEPT**self._exchanges)
        self._mean = Noise(
            kept * self._mean.square + (1 - kept) * found.square,
            kept * self._mean.variance + (1 - kept) * found.variance,
        )
        return self._mean if min(self._mean) > 0 else None

    def _add(self, parameter: torch.Tensor) -> None:
        self._squared = self._squared + self._squared_norm(parameter)

    def _squared_norm(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        half = values.dtype in (torch.float16, torch.bfloat16)
        norm = torch.linalg.vector_norm(values, dtype=torch.float32 if half else None)
        return norm.to(self._device, torch.float32).square()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _zeros(self) -> torch.Tensor:
        """Return six sums: squared norms, 1 / samples and count of the small batches, then of the large."""
        return torch.zeros(6, device=self._device)


def _noise(small: float, of_small: float, large: float, of_large: float) -> Noise:
    """Compute the noise from the mean squared norms and the means of 1 / samples of both kinds of batches."""
    if of_small <= of_large:
        return Noise(0.0, 0.0)
    variance = (small - large) / (of_small - of_large)
    return Noise(large - variance * of_large, variance)


def _check(model: nn.Module) -> None:
    """Raise `ConfigurationError` for a model whose ranks average gradients before their own are complete."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - slow to import

    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) or hasattr(
            module, "set_requires_gradient_sync"
        ):
            raise ConfigurationError(
                f"max_global_batch_size does not go with {type(module).__name__}: no rank has its own gradient,"
                " whose noise could be measured; use DistributedDataParallel."
            )
