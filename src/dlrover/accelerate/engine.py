"""`auto_accelerate`: analyse a model, plan a strategy, apply it."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import default_collate

from dlrover.accelerate import (
    choosing,
    elastic,
    loading,
    optimizers,
    strategies,
    world,
)
from dlrover.accelerate.anatomy import Anatomy, analyse
from dlrover.accelerate.applying import ApplyOptions, apply
from dlrover.accelerate.materialise import Materialiser
from dlrover.accelerate.microbatch import FORMATS, StepOutput, Weighting, loss_of_output, scaled
from dlrover.accelerate.modes.precision import WorldScaler, scaler_of
from dlrover.accelerate.modes.tensor_rules import Rules
from dlrover.accelerate.state import TrainingState, models_of
from dlrover.accelerate.world import Grid
from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.records import Cluster, Strategy

_log = logging.getLogger(__name__)

OPTIONS = {
    "accelerator", "batch_size", "blocks", "expand_sample_batch", "find_unused_parameters",
    "ignore_dryrun_on_load_strategy", "meta_init_offload_name", "sample_batch", "sampler_seed", "time_limit",
    "verbose",
}  # fmt: skip
"""Further keyword arguments."""


class AutoAccelerateResult(NamedTuple):
    """What trains: everything that a training loop needs."""

    model: nn.Module
    optim: Any
    dataloader: Any
    loss_func: Callable[[Any, Any], torch.Tensor]
    """Returns the loss of ``(data, output)``; call its ``backward``."""
    prepare_input: Callable[[Any, Any], Any]
    """Returns ``(data, device)``'s data on the device."""
    lr_scheduler: Any
    args: dict[str, Any]
    """``device``; ``state``, the model's and the optimizer's for a `dlrover.checkpoint.Checkpointer`; ``scaler``, the ``GradScaler`` of fp16 or None; ``data_parallel``, the rank and the number of
    ranks with different data; ``use_optim_backward`` and ``requires_set_gradient_accumulation_boundary``, False."""


def auto_accelerate(  # noqa: PLR0913 - the original's signature
    model: nn.Module,
    optim_func: Any = None,
    dataset: Any = None,
    loss_func: Callable[[Any, Any], torch.Tensor] | None = None,
    prepare_input: Callable[[Any, Any], Any] | None = None,
    model_input_format: str | None = None,
    optim_args: Mapping[str, Any] | None = None,
    optim_param_func: Callable[[nn.Module], Any] | None = None,
    dataloader_args: Mapping[str, Any] | None = None,
    distributed_sampler_cls: type | None = None,
    excluded: Collection[str] | None = None,
    included: Collection[str] | None = None,
    load_strategy: Any = None,
    lr_scheduler_cls: Any = None,
    lr_scheduler_args: Mapping[str, Any] | None = None,
    finetune_strategy: bool = False,
    save_strategy_to_file: Any = None,
    **kargs: Any,
) -> tuple[bool, AutoAccelerateResult, Strategy]:
    """Apply a parallel strategy to a model: the given one, or the planner's fastest that fits. Collective.

    The training loop is the same for all strategies::

        status, result, strategy = auto_accelerate(model, torch.optim.AdamW, dataset, loss_func=loss_of, ...)
        for data in result.dataloader:
            data = result.prepare_input(data, result.args["device"])
            output = result.model(data)  # or (*data), (**data): as model_input_format says
            loss = result.loss_func(data, output)
            loss.backward()
            result.optim.step()
            result.optim.zero_grad()

    Where a step takes several passes (a pipeline, or more samples than ``micro_batch``), the model returns a
    `StepOutput`, which has the loss alone.

    Args:
        model: any module, also on the meta device; its repeated blocks are the units of the strategy.
        optim_func: optimizer class, its name, or a function of the parameters and ``optim_args``.
        dataset: dataset with a length; without one, the program loads its own data.
        loss_func: returns the mean loss of ``(data, output)``; by default the loss that the model returns.
        prepare_input: moves ``(data, device)``; by default all that has a method ``to``, as tensors.
        model_input_format: None for ``model(data)``, ``"unpack_sequence"`` or ``"unpack_dict"``.
        optim_args: keyword arguments of ``optim_func``.
        optim_param_func: returns the parameter groups of the model, whose names are those of the unchanged one; in a
            pipeline it has the modules of this rank only.
        dataloader_args: keyword arguments of the dataloader; ``batch_size`` is that of the global batch.
        distributed_sampler_cls: class of a sampler of the whole dataset, made from the dataset alone.
        excluded: methods that the planner must not use, such as ``"tensor_parallel"``.
        included: methods that alone the planner may use.
        load_strategy: a path, JSON, a `Strategy`, or a list of methods in the original's form.
        lr_scheduler_cls: learning-rate scheduler, made from the optimizer and ``lr_scheduler_args``.
        lr_scheduler_args: keyword arguments of ``lr_scheduler_cls``.
        finetune_strategy: let the planner choose sharding, ``micro_batch``, recomputation and offload for the degrees
            tp, pp, cp and ep of the given strategy.
        save_strategy_to_file: path to which rank 0 writes the strategy as JSON.
        **kargs: ``blocks``, the name of the model's list of blocks; ``accelerator``, the one to plan for;
            ``sample_batch`` and ``batch_size`` (global), where there is no dataset; ``sampler_seed``;
            ``find_unused_parameters``. The original's ``time_limit``, ``verbose``, ``expand_sample_batch``,
            ``ignore_dryrun_on_load_strategy`` and ``meta_init_offload_name`` have no effect.

    Returns:
        True, the result, and the strategy.

    Raises:
        ConfigurationError: an argument is wrong, or the strategy cannot be applied; before any process group
            is built.
        InfrastructureError: the ranks have chosen different strategies.
    """
    _check(kargs, model_input_format, finetune_strategy, load_strategy)
    anatomy = analyse(model, kargs.get("blocks"))
    batch = _global_batch(dataloader_args, kargs)
    strategy = _strategy(anatomy, load_strategy, batch, dataset, excluded, included, finetune_strategy, kargs)  # fmt: skip
    strategies.check(strategy, anatomy, world.size())
    rules = Rules(model, strategy.tensor_rules)
    if strategy.tp > 1:
        rules.check(model, anatomy.blocks, strategy.tp)
        whole = rules.whole_attention(model, anatomy.blocks, strategy.tp)
        if whole and strategy.sequence_parallel and load_strategy is not None:
            raise ConfigurationError(
                f"Strategy: sequence_parallel is True; accepted is False, because no rule divides {whole!r} into columns and"
                " rows, and if it is attention, it would see a part of each sequence only."
            )
        strategy = replace(strategy, sequence_parallel=strategy.sequence_parallel and not whole)
    device = world.device()
    Materialiser(model, device).check()
    world.join(device)
    world.check_same(strategy, device)
    if save_strategy_to_file is not None and (world.size() == 1 or torch.distributed.get_rank() == 0):  # fmt: skip
        strategies.save(strategy, save_strategy_to_file)
    grid = Grid(strategy, device, strategies.expert_ranks(strategy, anatomy))
    loader = None
    if dataset is not None:
        loader = loading.dataloader(
            dataset, dataloader_args, rank=grid.data_rank, ranks=strategy.dp,
            seed=kargs.get("sampler_seed", 0), sampler_cls=distributed_sampler_cls,
        )  # fmt: skip
    scaler = scaler_of(device) if strategy.precision == "fp16" else None
    inner_loss = loss_func or loss_of_output
    weighting = Weighting(
        1.0 if loader is None else loader.batch_sampler.weight,
        (lambda: 1.0) if scaler is None else scaler.get_scale,
        math.gcd(batch // strategy.dp or 1, -(-batch // strategy.dp)),
    )
    options = ApplyOptions(
        form=model_input_format, loss_function=inner_loss,
        weighting=weighting,
        batch=-(-batch // strategy.dp), find_unused=kargs.get("find_unused_parameters", False),
    )  # fmt: skip
    model = apply(model, anatomy, rules, grid, options)
    optimizer = None
    if optim_func is not None:
        optimizer = optimizers.build(
            optim_func, [*models_of(model)], strategy, optim_args, optim_param_func
        )
        if scaler is not None:
            optimizers.scale_steps(model, optimizer, scaler)
    scheduler = None
    if lr_scheduler_cls is not None:
        scheduler = lr_scheduler_cls(optimizer, **(lr_scheduler_args or {}))
    result = AutoAccelerateResult(
        model, optimizer, loader, _loss(inner_loss, weighting), prepare_input or _to,
        scheduler, _arguments(grid, scaler, TrainingState(model, optimizer, anatomy, grid)),
    )  # fmt: skip
    _log.info("The strategy is %s.", strategy)
    return True, result, strategy


def _check(kargs: Mapping[str, Any], form: str | None, finetune: bool, given: Any) -> None:
    for name in kargs:
        if name not in OPTIONS:
            raise ConfigurationError(
                f"auto_accelerate has no argument {name!r}; accepted besides the named ones are"
                f" {', '.join(sorted(OPTIONS))}."
            )
    if form not in FORMATS:
        raise ConfigurationError(
            f"model_input_format is {form!r}; accepted are {', '.join(map(repr, FORMATS))}."
        )
    if finetune and given is None:
        raise ConfigurationError("finetune_strategy is True; accepted without load_strategy is False.")  # fmt: skip


def _strategy(  # noqa: PLR0913 - what a choice depends on
    anatomy: Anatomy,
    given: Any,
    batch: int,
    dataset: Any,
    excluded: Collection[str] | None,
    included: Collection[str] | None,
    finetune: bool,
    kargs: Mapping[str, Any],
) -> Strategy:
    if given is not None and not finetune:
        return strategies.load(given, world.size(), batch)
    accelerator = kargs.get("accelerator") or choosing.accelerator_of(world.device())
    near, ranks, sequence = world.per_node(), world.size(), _sequence(dataset, kargs)

    task = choosing.StrategyTask(
        anatomy, sequence, batch or ranks,
        tuple(sorted(excluded or ())), None if included is None else tuple(sorted(included)),
    )  # fmt: skip

    def cluster(size: int) -> Cluster:
        return choosing.cluster_of(accelerator, size, near)

    if finetune:
        return choosing.within(task, cluster(ranks), strategies.load(given, ranks, batch))
    strategy = elastic.agreed(
        elastic.key(anatomy.transformer, anatomy.blocks, accelerator, near, *task[1:]),
        lambda size: choosing.candidates(task, cluster(size)),
        ranks, near, anatomy.state_bytes,
    )  # fmt: skip
    if strategy is None:
        raise choosing.nothing_fits(task, cluster(ranks))
    if batch and strategy.dp > batch:
        _log.warning(
            "%s of %s data-parallel ranks are idle: the global batch has %s samples.",
            strategy.dp - batch, strategy.dp, batch,
        )  # fmt: skip
    return strategy


def _global_batch(dataloader_args: Mapping[str, Any] | None, kargs: Mapping[str, Any]) -> int:
    """Return the samples of a global batch; 0 if nothing tells."""
    size = (dataloader_args or {}).get("batch_size", kargs.get("batch_size", 0))
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ConfigurationError(f"batch_size is {size!r}; accepted is a positive integer, the global batch.")  # fmt: skip
    return size


def _sequence(dataset: Any, kargs: Mapping[str, Any]) -> int:
    """Return the tokens of a sequence: the second size of the first tensor of whole numbers."""
    sample = kargs.get("sample_batch")
    if sample is None:
        if dataset is None:
            raise ConfigurationError(
                "auto_accelerate needs a dataset or sample_batch to choose a strategy; or pass load_strategy."
            )
        sample = default_collate([dataset[0]])
    for leaf in tree_flatten(sample)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1:
            return int(leaf.shape[1])
    return 1


def _loss(
    inner: Callable[[Any, Any], torch.Tensor], weighting: Weighting
) -> Callable[[Any, Any], torch.Tensor]:
    """Return a loss function whose gradients have the weight of this rank's samples, and fp16's scale."""

    @functools.wraps(inner)
    def loss_func(data: Any, output: Any) -> torch.Tensor:
        if isinstance(output, StepOutput):
            return scaled(output.loss, weighting.scale)
        return scaled(inner(data, output), lambda: weighting.factor)

    return loss_func


def _to(data: Any, device: Any) -> Any:
    """Move all that can be moved to the device: tensors, and what has them, as a tokenizer's batch."""
    return tree_map(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, data)


def _arguments(grid: Grid, scaler: WorldScaler | None, state: TrainingState) -> dict[str, Any]:
    return {
        "state": state,
        "device": grid.device,
        "scaler": scaler,
        "data_parallel": (grid.data_rank, grid.strategy.dp),
        "use_optim_backward": False,
        "requires_set_gradient_accumulation_boundary": False,
    }
