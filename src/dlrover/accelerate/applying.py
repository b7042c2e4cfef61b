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
from dlrover.accelerate.modes.context import Context, share_attention
from dlrover.accelerate.modes.experts import divide_experts
from dlrover.accelerate.modes.fsdp import Sharder
from dlrover.accelerate.modes.pipeline import Pipeline, cut
from dlrover.accelerate.modes.precision import autocast
from dlrover.accelerate.modes.recompute import recompute
from dlrover.accelerate.modes.tensor import (
    Flow,
    divide_block,
    divide_ends,
    first_input,
    last_output,
    spread_rest,
)
from dlrover.accelerate.modes.tensor_rules import Rules
from dlrover.accelerate.world import Grid


@dataclass(frozen=True)
class ApplyOptions:
    """What the application of a strategy needs to know of the program."""

    form: str | None
    """The model's input format, one of `microbatch.FORMATS`."""
    loss_function: LossFunction
    weighting: Weighting
    batch: int
    """Samples of a rank's part of a global batch; 0 if unknown."""
    find_unused: bool = False


def apply(
    model: nn.Module, anatomy: Anatomy, rules: Rules, grid: Grid, options: ApplyOptions
) -> nn.Module:
    """Return the model as the strategy wants it. Collective."""
    one = grid.strategy
    materialiser = Materialiser(model, grid.device)
    materialiser.equalise()
    if one.tp > 1:  # ranks with the same activations must drop the same ones
        torch.manual_seed(materialiser.seed + grid.data_rank)
    _prepare_hugging_face(model, attention=one.cp > 1)
    applied = _Application(model, anatomy, rules, grid, materialiser)
    if one.pp > 1:
        parts = cut(model, anatomy, grid, options.form, options.loss_function)
        for part in parts:
            applied.prepare(part, part.model)
        return Pipeline(parts, anatomy, grid, options.form, options.weighting)
    applied.prepare(model, model)
    sharder = applied.sharder
    if sharder.replicates:
        model = sharder.replicate(model, find_unused=options.find_unused)
    passes = -(-options.batch // one.micro_batch)
    if passes > 1:
        return Accumulated(model, passes, options.form, options.loss_function, options.weighting)
    return model


class _Application:
    """The application of a strategy to the parts of a model."""

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, rules: Rules, grid: Grid, materialiser: Materialiser
    ) -> None:  # fmt: skip
        one = grid.strategy
        self._anatomy, self._rules, self._grid, self._materialiser = anatomy, rules, grid, materialiser  # fmt: skip
        self.sharder = Sharder(grid, offload=one.offload)
        self._flow = Flow(grid.tensor, one.sequence_parallel) if one.tp > 1 else None
        self._context = Context(grid.context, one.context) if one.cp > 1 else None
        names = [*anatomy.before, *anatomy.after]
        self._ends = rules.ends(model, names, one.tp) if self._flow is not None else {}

    def prepare(self, unit: nn.Module, model: nn.Module) -> None:
        """Prepare a part of a pipeline, or the whole: ``model``, in the outermost ``unit`` that is sharded."""
        one, modules = self._grid.strategy, dict(model.named_modules())
        blocks = {name: modules[name] for name in self._anatomy.blocks if _has_parameters(modules.get(name))}  # fmt: skip
        for name, block in blocks.items():
            self._materialiser.bring(block)
            self._divide(name, block)
        self._divide_sequences(list(blocks.values()))
        for number, inner in enumerate(self._units(modules, blocks)):
            self._materialiser.bring(inner)
            if one.recompute != "none" and (not one.recompute_layers or number < one.recompute_layers):  # fmt: skip
                recompute(inner, one.recompute)
            if one.compile:
                inner.forward = torch.compile(inner.forward)
            self.sharder.shard(inner)
        self._materialiser.bring(model)
        if self._flow is not None:
            here = {name: style for name, style in self._ends.items() if _has_parameters(modules.get(name))}  # fmt: skip
            divide_ends(model, here, self._flow, self._grid.mesh["tp"])
        if not self.sharder.shards and one.tp * self._grid.expert_ranks > 1:
            spread_rest(model, self._grid.mesh["tp"])
        if one.precision != "fp32" and not self.sharder.casts:
            autocast(unit, one.precision, self._grid.device)
        self.sharder.shard(unit, root=True)

    def _divide(self, name: str, block: nn.Module) -> None:
        """Divide the matrices, the experts and the attention of a block."""
        one = self._grid.strategy
        if self._flow is not None:
            regions = self._rules.regions(name, block, one.tp)
            divide_block(block, regions, self._flow, self._grid.mesh["tp"])
        if one.tp > 1 or self._grid.expert_ranks > 1:
            for inner, module in block.named_modules():
                if f"{name}.{inner}" in self._anatomy.experts:
                    divide_experts(module, self._grid)
                    self.sharder.shard_experts(module)
        if self._context is not None:
            share_attention(block, self._context)

    def _divide_sequences(self, blocks: list[nn.Module]) -> None:
        """Let the first block get a rank's part of the sequences, and the last one return whole ones."""
        if not blocks:
            return
        for division in (self._context, self._flow):
            if division is not None:
                first_input(blocks[0], division.begin)
        for division in (self._flow, self._context):
            if division is not None:
                last_output(blocks[-1], division.end)
        if self._context is not None:
            for block in blocks:
                self._context.watch(block)

    def _units(
        self, modules: dict[str, nn.Module], blocks: dict[str, nn.Module]
    ) -> Iterator[nn.Module]:
        """Yield the modules that are sharded and recomputed as one."""
        wanted = self._grid.strategy.blocks
        if not wanted:
            yield from blocks.values()
            return
        for module in modules.values():
            if type(module).__name__ in wanted:
                yield module


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def _prepare_hugging_face(model: nn.Module, *, attention: bool) -> None:
    """Turn off the cache of keys and values, which training does not use, and choose PyTorch's attention if needed."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if attention and hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("sdpa")
