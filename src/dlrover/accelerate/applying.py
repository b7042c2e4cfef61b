"""A strategy is applied to a model: part by part, each brought to the device, divided and wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dlrover.accelerate.anatomy import Anatomy
from dlrover.accelerate.materialise import Materialiser
from dlrover.accelerate.microbatch import Accumulated, LossFunction, Weighting
from dlrover.accelerate.modes.fsdp import Sharder
from dlrover.accelerate.modes.precision import autocast
from dlrover.accelerate.modes.recompute import recompute
from dlrover.accelerate.world import Grid
from dlrover.planning.parallel.records import Strategy


@dataclass(frozen=True)
class Options:
    """What the application of a strategy needs to know of the program."""

    form: str | None
    """The model's input format, one of `microbatch.FORMATS`."""
    loss_function: LossFunction
    weighting: Weighting
    batch: int
    """Samples of a rank's part of a global batch; 0 if unknown."""
    find_unused: bool = False


def apply(model: nn.Module, anatomy: Anatomy, grid: Grid, options: Options) -> nn.Module:
    """Return the model as the strategy wants it. Collective."""
    materialiser = Materialiser(model, grid.device)
    materialiser.check()
    materialiser.equalise()
    _quiet_cache(model)
    one = grid.strategy
    _prepare(model, anatomy, grid, materialiser)
    sharder = Sharder(grid, offload=one.offload)
    if one.precision != "fp32" and not sharder.casts:
        autocast(model, one.precision, grid.device)
    if sharder.replicates:
        model = sharder.replicate(model, find_unused=options.find_unused)
    passes = -(-options.batch // one.micro_batch)
    if passes > 1:
        return Accumulated(model, passes, options.form, options.loss_function, options.weighting)
    return model


def _prepare(part: nn.Module, anatomy: Anatomy, grid: Grid, materialiser: Materialiser) -> None:
    """Divide and wrap a whole model, or one part of a pipeline."""
    one = grid.strategy
    sharder = Sharder(grid, offload=one.offload)
    for number, (_, unit) in enumerate(_units(part, anatomy, one)):
        materialiser.bring(unit)
        if one.recompute != "none" and (not one.recompute_layers or number < one.recompute_layers):
            recompute(unit, one.recompute)
        if one.compile:
            unit.forward = torch.compile(unit.forward)
        sharder.shard(unit)
    materialiser.bring(part)
    sharder.shard(part, root=True)


def _units(part: nn.Module, anatomy: Anatomy, one: Strategy) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are sharded and recomputed as one; without blocks, there are none."""
    for name, module in part.named_modules():
        if type(module).__name__ in one.blocks if one.blocks else name in anatomy.blocks:
            yield name, module


def _quiet_cache(model: nn.Module) -> None:
    """Turn off the cache of keys and values of a Hugging Face model, which training does not use."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
