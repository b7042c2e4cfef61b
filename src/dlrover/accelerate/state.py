"""The state of an accelerated training, in a form that does not depend on the strategy.

Each rank states which part of each whole tensor it has, also the empty one. So a checkpoint of one strategy loads
under any other, on any number of ranks, with pipelines cut elsewhere or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dlrover.accelerate.anatomy import Anatomy
from dlrover.accelerate.microbatch import Accumulated
from dlrover.accelerate.modes.pipeline import Pipeline
from dlrover.accelerate.optimizers import STEPS
from dlrover.accelerate.world import Grid
from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.engine.tree import Shard
from dlrover.errors import ConfigurationError

HOW = {"params", *STEPS}
"""Options of parameter groups that depend on the strategy."""
OF_ALL_TENSORS = {"tp", "ep", "expert_shard"}
"""Names of mesh dimensions. Each mesh that covers the ranks of tensor parallelism has one of them."""


class TrainingState:
    """The parameters, buffers and the optimizer's state of a model, for `dlrover.checkpoint.Checkpointer`."""

    def __init__(self, model: nn.Module, optimizer: Any, anatomy: Anatomy, grid: Grid) -> None:
        self._optimizer, self._anatomy, self._grid = optimizer, anatomy, grid
        self._first = {name: group[0] for group in anatomy.tied for name in group}
        self._repeated: frozenset[Any] = getattr(model, "repeated_parameters", frozenset())
        self._tensors: dict[str, torch.Tensor] = {}
        for inner in models_of(model):
            persistent = inner.state_dict(keep_vars=True)
            for name, tensor in persistent.items():
                self._tensors.setdefault(self._first.get(name, name), tensor)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parts of all tensors, by the names in the unchanged model."""
        return {
            "model": {
                name: self._part(name, self._tensors[name]) if name in self._tensors else _nothing(*known)
                for name, known in self._anatomy.shapes.items()
            },
            "optimizer": self._moments(),
            "groups": [
                {key: value for key, value in group.items() if key not in HOW}
                for group in ([] if self._optimizer is None else self._optimizer.param_groups)
            ],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the parts that a checkpoint has for this rank."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                _take(name, tensor, state["model"][name])
        if self._optimizer is None:
            return
        _fill(self._optimizer)
        for name, parameter in self._trained():
            live, saved = self._optimizer.state[parameter], state["optimizer"].get(name, {})
            for key, value in saved.items():
                if isinstance(live.get(key), torch.Tensor):
                    _take(f"{name} {key}", live[key], value)
                else:
                    live[key] = value
        for group, values in zip(self._optimizer.param_groups, state["groups"], strict=False):
            group.update(values)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        known = {id(item) for group in self._optimizer.param_groups for item in group["params"]}
        for name, tensor in self._tensors.items():
            if id(tensor) in known:
                yield name, tensor

    def _moments(self) -> dict[str, Any]:
        """Return the optimizer's state by parameter; that of a new optimizer is what it would begin with."""
        if self._optimizer is None:
            return {}
        new = not self._optimizer.state
        if new:
            _fill(self._optimizer)
        here = {name: self._optimizer.state[parameter] for name, parameter in self._trained()}
        found: dict[str, Any] = {}
        samples = [name for name, state in here.items() if state]
        for name in self._anatomy.trained if samples else ():
            if name in here:
                found[name] = {key: self._moment(name, key, value) for key, value in here[name].items()}  # fmt: skip
            else:
                found[name] = self._elsewhere(
                    name, here[samples[0]], self._tensors[samples[0]].shape
                )
        if new:
            self._optimizer.state.clear()
        return found

    def _moment(self, name: str, key: str, value: Any) -> Any:
        """Return this rank's part of one value of a parameter's state."""
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        if isinstance(self._tensors[name], DTensor) and not isinstance(value, DTensor):
            raise ConfigurationError(
                f"The optimizer's state {key!r} of {name!r} is a plain tensor; accepted are numbers, and tensors that are"
                " spread over ranks as their parameter is."
            )
        return self._part(name, value)

    def _elsewhere(self, name: str, state: Mapping[str, Any], shape: Any) -> dict[str, Any]:
        """Return the empty parts of a state that other ranks have, which is like that of a parameter with ``shape``."""
        whole = self._anatomy.shapes[name][0]
        found = dict(state)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if value.shape != shape:
                    raise ConfigurationError(
                        f"The optimizer's state {key!r} has the shape {list(value.shape)}; accepted with pp is that of its"
                        f" parameter, {list(shape)}."
                    )
                found[key] = _nothing(whole, value.dtype)
        return found

    def _part(self, name: str, tensor: Any) -> Any:
        """Return this rank's part of a tensor."""
        if not tensor.dim():
            return tensor
        box = tree.extent(tensor.detach(), (name,))
        return Shard(_local(tensor), tuple(tensor.shape), box.at, self._owner(name, tensor))

    def _owner(self, name: str, tensor: Any) -> int:
        """Return the lowest rank that has the same part."""
        if not dist.is_initialized():
            return -1
        one = self._grid.strategy
        each = int(dist.get_world_size()) // one.pp
        owner = self._grid.stage * each
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            at = [
                0 if placement.is_replicate() else place
                for placement, place in zip(tensor.placements, mesh.get_coordinate() or [], strict=True)
            ]  # fmt: skip
            owner = int(mesh.mesh[tuple(at)])
            if not OF_ALL_TENSORS & set(mesh.mesh_dim_names or ()):
                owner -= owner % one.tp
        if self._tensors[name] in self._repeated:
            owner -= self._grid.stage * each
        return owner


def models_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that have the names of the unchanged model."""
    if isinstance(model, Pipeline):
        for part in model.parts:
            yield part.model
    elif isinstance(model, Accumulated | DistributedDataParallel):
        yield from models_of(model.module)
    else:
        yield model


def _nothing(whole: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the empty part of a tensor."""
    if not whole:
        return torch.zeros((), dtype=dtype)
    return Shard(torch.empty(0, *whole[1:], dtype=dtype), whole, (whole[0], *[0] * len(whole[1:])))


def _local(tensor: Any) -> torch.Tensor:
    inner = tensor.detach()
    return inner.to_local() if isinstance(inner, DTensor) else inner


def _take(name: str, live: Any, saved: Any) -> None:
    """Overwrite a tensor with the saved part of it."""
    target, found = _local(live), saved.tensor if isinstance(saved, Shard) else saved
    if target.shape != found.shape:
        raise ConfigurationError(
            f"The checkpoint has {name!r} with the shape {list(found.shape)} for this rank; accepted is {list(target.shape)}."
        )
    target.copy_(found)


def _fill(optimizer: Any) -> None:
    """Let an optimizer without state make what it begins with; parameters and counts of steps stay as they are."""
    if optimizer.state:
        return
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    gradients = [item.grad for item in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)  # without hooks, which count steps
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif isinstance(value, int):
                state[key] = 0
