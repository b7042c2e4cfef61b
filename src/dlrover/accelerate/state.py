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
from dlrover.accelerate.world import Grid
from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.engine.tree import Shard
from dlrover.errors import ConfigurationError

OF_ALL_TENSORS = {"tp", "ep", "expert_shard"}
"""Names of mesh dimensions, one of which is in each mesh that covers the ranks of tensor parallelism."""


class TrainingState:
    """The parameters, buffers and the optimizer's state of a model, for `dlrover.checkpoint.Checkpointer`."""

    def __init__(self, model: nn.Module, optimizer: Any, anatomy: Anatomy, grid: Grid) -> None:
        self._optimizer, self._anatomy, self._grid = optimizer, anatomy, grid
        self._first = {name: group[0] for group in anatomy.tied for name in group}
        self._repeated: frozenset[Any] = getattr(model, "repeated_parameters", frozenset())
        self._tensors: dict[str, torch.Tensor] = {}
        for inner in _models(model):
            persistent = inner.state_dict(keep_vars=True)
            for name, tensor in persistent.items():
                self._tensors.setdefault(self._first.get(name, name), tensor)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parts of all tensors, by the names in the unchanged model."""
        return {
            "model": {name: self._part(name, self._tensors.get(name)) for name in self._anatomy.shapes},
            "optimizer": self._moments(),
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in ([] if self._optimizer is None else self._optimizer.param_groups)
            ],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the parts that a checkpoint has for this rank."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                _local(tensor).copy_(_whole(state["model"][name], _local(tensor)))
        if self._optimizer is None:
            return
        _fill(self._optimizer)
        for name, parameter in self._trained():
            live, saved = self._optimizer.state[parameter], state["optimizer"].get(name, {})
            for key, value in saved.items():
                if isinstance(live.get(key), torch.Tensor):
                    _local(live[key]).copy_(_whole(value, _local(live[key])))
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
        sample = next(((name, state) for name, state in here.items() if state), None)
        found = {}
        if sample is not None:
            usual = self._tensors[sample[0]].shape
            for name in self._anatomy.trained:
                found[name] = {
                    key: self._moment(name, key, here.get(name, {}).get(key, value), like=value, usual=usual, present=name in here)
                    for key, value in (here.get(name) or sample[1]).items()
                }  # fmt: skip
        if new:
            self._optimizer.state.clear()
        return found

    def _moment(
        self, name: str, key: str, value: Any, *, like: Any, usual: Any, present: bool
    ) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        wanted = self._tensors[name].shape if present else usual
        if like.shape != wanted:
            raise ConfigurationError(
                f"The optimizer's state {key!r} of {name!r} has the shape {list(like.shape)}; accepted are that of its"
                f" parameter, {list(wanted)}, and numbers."
            )
        return self._part(name, value if present else None)

    def _part(self, name: str, tensor: Any) -> Any:
        """Return this rank's part of a tensor, or the empty part of one that other ranks have."""
        whole, dtype = self._anatomy.shapes[name]
        if not whole:
            return tensor if tensor is not None else torch.zeros((), dtype=dtype)
        if tensor is None:
            empty = torch.empty(0, *whole[1:], dtype=dtype)
            return Shard(empty, whole, (whole[0], *[0] * (len(whole) - 1)))
        box = tree.extent(tensor.detach(), (name,))
        return Shard(_local(tensor), whole, box.at, self._owner(name, tensor))

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


def _models(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that have the names of the unchanged model."""
    if isinstance(model, Pipeline):
        for part in model.parts:
            yield part.model
    elif isinstance(model, Accumulated | DistributedDataParallel):
        yield from _models(model.module)
    else:
        yield model


def _local(tensor: Any) -> torch.Tensor:
    inner = tensor.detach()
    return inner.to_local() if isinstance(inner, DTensor) else inner


def _whole(value: Any, like: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = value.tensor if isinstance(value, Shard) else value
    return found.to(like.device)


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
