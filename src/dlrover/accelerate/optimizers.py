"""The optimizer of an accelerated model: its class by name, fused where PyTorch can, with fp16's scale."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dlrover.accelerate.modes.precision import WorldScaler
from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.records import Strategy

HOMES = ("dlrover.optim", "torch.optim")
"""Modules in which an optimizer's name is looked up."""
STEPS = {"fused", "foreach", "differentiable", "capturable"}
"""Arguments that choose how PyTorch's optimizers step."""
FUSED_SPREAD = {torch.optim.Adam, torch.optim.AdamW}
"""Optimizers whose fused step takes parameters that are spread over ranks."""
EIGHT_BIT = {torch.optim.AdamW: "AdamW8bit"}
"""Optimizers for strategies with 6 bytes of optimizer state a parameter or fewer."""


def build(
    choice: Any,
    models: Sequence[nn.Module],
    strategy: Strategy,
    arguments: Mapping[str, Any] | None,
    groups_of: Callable[[nn.Module], Iterable[Any]] | None,
) -> Any:
    """Return the optimizer of this rank's parameters.

    Args:
        choice: a class, the name of one in ``dlrover.optim`` or ``torch.optim``, or a function of the parameters.
        models: the model, or this rank's parts of it, with the parameters as they are trained and under their own names.
        strategy: decides about 8-bit states.
        arguments: keyword arguments of ``choice``; ``fused=True`` is added where PyTorch offers it.
        groups_of: returns the parameter groups of a model; those of several parts are joined by their places.

    Raises:
        ConfigurationError: the name is unknown.
    """
    function = named(choice) if isinstance(choice, str) else choice
    if strategy.optimizer_bytes <= 6 and function in EIGHT_BIT:
        function = named(EIGHT_BIT[function])
    options = dict(arguments or {})
    parameters = [item for model in models for item in model.parameters() if item.requires_grad]
    if strategy.pp > 1 and not parameters:  # all that other stages train is frozen here
        parameters = [nn.Parameter(torch.empty(0))]
    if _fuses(function, parameters) and not STEPS & options.keys():
        options["fused"] = True
    groups = list(dict.fromkeys(parameters)) if groups_of is None else _joined(map(groups_of, models))  # fmt: skip
    return function(groups, **options)


def _joined(of_parts: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the parameter groups of several parts of a model, each with the parameters of all parts."""
    first, *others = (list(groups) for groups in of_parts)
    for groups in others:
        if not all(isinstance(each, dict) for each in (*first, *groups)):
            first += groups
            continue
        for group, more in zip(first, groups, strict=True):
            group["params"] = [*group["params"], *more["params"]]
    return first


def named(name: str) -> Any:
    """Return the optimizer class of a name, in any case.

    Raises:
        ConfigurationError: there is none.
    """
    for home in HOMES:
        module = importlib.import_module(home)
        for known in getattr(module, "__all__", dir(module)):
            if known.lower() == name.lower() and inspect.isclass(getattr(module, known)):
                return getattr(module, known)
    raise ConfigurationError(
        f"optim_func is {name!r}; accepted are classes, functions, and names of classes in {' and '.join(HOMES)}."
    )


def _fuses(function: Any, parameters: Collection[Any]) -> bool:
    """Return whether PyTorch has a fused step of an optimizer for parameters of this kind."""
    if not inspect.isclass(function) or not function.__module__.startswith("torch.optim"):
        return False
    if not all(parameter.is_floating_point() for parameter in parameters):
        return False
    spread = any(isinstance(parameter, DTensor) for parameter in parameters)
    if spread and function not in FUSED_SPREAD:
        return False
    return "fused" in inspect.signature(function).parameters


def scale_steps(model: nn.Module, optimizer: Any, scaler: WorldScaler) -> None:
    """Make the optimizer's step undo the scale of fp16, and leave out a step whose gradients have overflown.

    The optimizer stays the same object, for schedulers and checkpoints. `clip_grad_norm_` undoes the scale by ``model``.
    """
    inner = optimizer.step
    stepping = False

    def step(_self: Any, closure: Any = None) -> Any:
        nonlocal stepping
        if stepping:
            return inner()
        if closure is not None:
            raise ConfigurationError("optim.step got a closure; accepted with fp16 is none.")
        stepping = True
        try:
            result = scaler.step(optimizer)
        finally:
            stepping = False
        scaler.update()
        return result

    optimizer.step = types.MethodType(step, optimizer)
    model.unscale = functools.partial(scaler.unscale_, optimizer)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale a model's gradients so that their norm over all ranks is at most ``max_norm``; return the norm.

    Each element counts once, however it is spread, and without fp16's scale, which is undone. Collective.

    Args:
        model: the result's model.
        max_norm: the largest 2-norm that is left as it is.
    """
    getattr(model, "unscale", bool)()
    stages = getattr(model, "pipeline_stages", 1)
    repeated: frozenset[Any] = getattr(model, "repeated_parameters", frozenset())
    ranks = dist.get_world_size() // stages if dist.is_initialized() else 1
    parameters = [item for item in model.parameters() if item.grad is not None]
    counted = [item for item in parameters if item not in repeated]
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float32, device=device)
    for parameter in counted:
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        total += local.float().square().sum() * (_shards(parameter) / ranks)
    if dist.is_initialized():
        dist.all_reduce(total)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        gradient = parameter.grad
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)
    return norm


def _shards(parameter: Any) -> int:
    """Return into how many different parts a parameter is divided."""
    count = 1
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                count *= int(parameter.device_mesh.size(dimension))
    return count
