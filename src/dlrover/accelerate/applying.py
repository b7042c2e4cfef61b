"""A strategy is applied to a model: part by part, each brought to the device, divided and wrapped."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dlrover.accelerate.anatomy import Anatomy
from dlrover.accelerate.materialise import Materialiser
from dlrover.accelerate.microbatch import Accumulated, LossFunction, Weighting
from dlrover.accelerate.modes.context import Context, share_attention
from dlrover.accelerate.modes.experts import divide_experts
from dlrover.accelerate.modes.pipeline import Pipeline, cut
from dlrover.accelerate.modes.precision import DTYPES, autocast
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
            divide_block(block, name, regions, self._flow, self._grid.mesh["tp"])
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
    # The halves of an encoder-decoder model have configurations of their own.
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
    if attention and hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("sdpa")


# ---- recomputation

_ATEN = torch.ops.aten
KEPT = {
    operation
    for name in (
        "mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable",
    )
    if (packet := getattr(_ATEN, name, None)) is not None
    for operation in (packet.default,)
}  # fmt: skip
"""Operations whose results are kept by selective recomputation: products of matrices, and fused attention."""


def recompute(block: nn.Module, how: str) -> None:
    """Make a block's backward pass compute its activations again: ``full``, or all but ``KEPT``.

    The block stays the same module with the same names; only its ``forward`` is wrapped.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    inner = block.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, **options, **kwargs)

    block.forward = forward


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Sharder:
    """Applies data parallelism to the parts of a model.

    ``fully_shard`` does it all; only where ranks hold whole models and share nothing else, it is
    ``DistributedDataParallel``, which overlaps its all-reduces with less work.
    """

    def __init__(self, grid: Grid, *, offload: bool) -> None:
        one = grid.strategy
        self._grid = grid
        whole = one.tp == one.pp == grid.expert_ranks == 1 and not grid.sharded and not offload
        self.replicates = whole and grid.copies > 1
        """True if `replicate` is to be called for the whole model, and nothing else."""
        self.shards = not whole and (grid.copies * grid.shards > 1 or offload)
        """True if `shard` has to be called for each unit, and for the model at last."""
        self._options: dict[str, Any] = {"reshard_after_forward": one.zero == 3}
        if offload:
            pin = grid.device.type != "cpu"
            self._options["offload_policy"] = CPUOffloadPolicy(pin_memory=pin)

    @property
    def casts(self) -> bool:
        """True if sharding also casts parameters and inputs to the type of the matrix products."""
        return self.shards

    def shard(self, unit: nn.Module, *, root: bool = False) -> None:
        """Shard the parameters of a unit that no inner unit has."""
        if self.shards:
            names = ("replicate", "shard") if self._grid.copies > 1 else ("shard",)
            fully_shard(unit, mesh=self._grid.mesh[names], **self._policies(root))

    def shard_experts(self, experts: nn.Module) -> None:
        """Shard the parameters of experts over the ranks that have the same experts."""
        mesh = self._grid.experts["expert_replicate", "expert_shard"]
        if mesh.size() > 1 or self.shards:
            copies = mesh.size(0) > 1
            chosen = mesh if copies else self._grid.experts["expert_shard"]
            fully_shard(experts, mesh=chosen, **self._policies(root=False))

    def _policies(self, root: bool) -> dict[str, Any]:
        one = self._grid.strategy
        dtype = DTYPES.get(one.precision)
        if dtype is None:
            return self._options
        policy = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=dtype if one.gradient_bytes == 2 else torch.float32,
            output_dtype=torch.float32 if root and one.pp == 1 else None,
        )
        return {**self._options, "mp_policy": policy}

    def replicate(self, model: nn.Module, *, find_unused: bool) -> nn.Module:
        """Return a model whose backward pass averages gradients over all ranks."""
        devices = None if self._grid.device.type == "cpu" else [self._grid.device.index]
        return DistributedDataParallel(
            model, device_ids=devices, find_unused_parameters=find_unused
        )
