"""Tensor parallelism: matrices divided over ranks, and with sequence parallelism also what lies between them.

After Shoeybi et al., 2019, and Korthikanti et al., 2022. A *region* is a module, such as attention, whose first
matrices are divided by columns and whose last ones by rows. Between regions all ranks have the same activations,
or with sequence parallelism their own part of each sequence: a region then begins with an all-gather and ends with
a reduce-scatter, in place of an all-reduce.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from dlrover.accelerate.modes import collectives
from dlrover.accelerate.modes.collectives import Parts, computes_with
from dlrover.accelerate.modes.tensor_rules import Region, Regions
from dlrover.errors import ConfigurationError

HEAD_COUNTS = (
    "num_heads", "n_heads", "n_head", "num_attention_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads",
    "split_size",
)  # fmt: skip
"""Attributes of attention modules that become those of a rank's heads."""
SEQUENCE = 1
"""Dimension of positions in activations."""


@dataclass
class Flow:
    """How activations lie between the regions of a model."""

    group: Any
    divided: bool
    """True if each rank has its own part of a sequence."""
    parts: Parts | None = None
    """That division, of the sequence that is computed now."""

    def begin(self, whole: torch.Tensor) -> torch.Tensor:
        """Take this rank's part of what enters the first block."""
        if not self.divided:
            return whole
        self.parts = Parts.equal(whole.shape[SEQUENCE], self.group, SEQUENCE, whole.device)
        return collectives.split(whole, self.parts)

    def end(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole of what leaves the last block."""
        return collectives.join(part, self._known) if self.divided else part

    def enter(self, activation: torch.Tensor) -> torch.Tensor:
        """Return what enters a region."""
        if self.divided:
            return collectives.gather(activation, self._known)
        return collectives.enter(activation, self.group)

    def leave(self, addend: torch.Tensor) -> torch.Tensor:
        """Return what leaves a region."""
        if self.divided:
            left = collectives.reduce_parts(addend, self._known)
        else:
            left = collectives.reduce(addend, self.group)
        if not torch.compiler.is_compiling() and left.grad_fn is not None:
            left.grad_fn.leaves = True
        return left

    @property
    def _known(self) -> Parts:
        assert self.parts is not None, "the first block divides the sequence"
        return self.parts


class _Style(ParallelStyle):  # type: ignore[misc]
    """A division of a module's parameters, for ``parallelize_module``."""

    def __init__(self, apply: Callable[[nn.Module, DeviceMesh], None]) -> None:
        super().__init__()
        self._function = apply

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._function(module, device_mesh)
        return module


def shard(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Replace a parameter that is equal on all ranks by this rank's part of it."""
    whole = getattr(module, name)
    part = whole.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
    spread = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
    module.register_parameter(name, nn.Parameter(spread, whole.requires_grad))


def local(_name: str, parameter: Any) -> Any:
    """Return this rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _columns(flow: Flow, parts: int, *, enters: bool, joins: bool) -> _Style:
    """Divide a matrix by columns, that is by outputs.

    ``parts`` matrices lie side by side in one parameter, whose columns are then not those that a rank computes
    with: the ranks exchange them at each use.
    """

    def apply(module: nn.Module, mesh: DeviceMesh) -> None:
        outputs = 1 if is_transposed(module) else 0
        shard(module, "weight", mesh, outputs)
        if module.bias is not None:
            shard(module, "bias", mesh, 0)

        def change(name: str, parameter: Any) -> Any:
            mine = local(name, parameter)
            if parts == 1:
                return mine
            return _repacked(mine, parts, outputs if name == "weight" else 0, flow.group)

        computes_with(module, change)
        if is_transposed(module):
            module.nf = module.nf // mesh.size()
        if enters:
            first_input(module, flow.enter)
        if joins:
            module.register_forward_hook(lambda _module, _inputs, output: _joined(output, flow))

    return _Style(apply)


def _joined(output: torch.Tensor, flow: Flow) -> torch.Tensor:
    size = output.shape[-1] * dist.get_world_size(flow.group)
    return collectives.join(output, Parts.equal(size, flow.group, output.dim() - 1, output.device))


def _repacked(mine: torch.Tensor, parts: int, dim: int, group: Any) -> torch.Tensor:
    """Return this rank's columns of each of the matrices that lie side by side."""
    ranks = dist.get_world_size(group)
    every = Parts.equal(mine.shape[dim] * ranks, group, dim, mine.device)
    whole = collectives.gather(mine, every)
    rank = dist.get_rank(group)
    return torch.cat([part.chunk(ranks, dim)[rank] for part in whole.chunk(parts, dim)], dim)


def _rows(flow: Flow) -> _Style:
    """Divide a matrix by rows, that is by inputs; the bias counts once."""

    def apply(module: nn.Module, mesh: DeviceMesh) -> None:
        shard(module, "weight", mesh, 0 if is_transposed(module) else 1)
        ranks = mesh.size()

        def change(name: str, parameter: Any) -> Any:
            if name == "bias":
                return collectives.through(
                    local(name, parameter), lambda whole: whole / ranks, collectives.same
                )
            return local(name, parameter)

        computes_with(module, change)
        module.register_forward_hook(lambda _module, _inputs, output: flow.leave(output))

    return _Style(apply)


def sum_gradients(module: nn.Module, flow: Flow) -> None:
    """Keep a module whole, and add up the gradients of the ranks, which see different parts of the activations."""
    add = collectives.total(flow.group)
    computes_with(module, lambda name, item: collectives.through(local(name, item), collectives.same, add))  # fmt: skip


def _vocabulary(flow: Flow) -> _Style:
    """Divide an embedding by words; each rank looks up its own, and the ranks add up what they found."""

    def apply(module: nn.Module, mesh: DeviceMesh) -> None:
        shard(module, "weight", mesh, 0)

        def forward(index: torch.Tensor) -> torch.Tensor:
            mine = module.weight.to_local()
            first = mesh.get_local_rank() * len(mine)
            known = (index >= first) & (index < first + len(mine))
            padding = -1 if module.padding_idx is None else module.padding_idx - first
            found = functional.embedding(
                (index - first).where(known, 0), mine, padding if 0 <= padding < len(mine) else None
            )
            return collectives.reduce(found * known.unsqueeze(-1), flow.group)

        module.forward = forward

    return _Style(apply)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module's weight has a row for each input: GPT-2's ``Conv1D``."""
    return type(module).__name__ == "Conv1D"


def first_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a module compute with ``change(activation)`` in place of its first tensor."""
    names = ["hidden_states", *inspect.signature(module.forward).parameters]

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            return (change(args[0]), *args[1:]), kwargs
        name = next(each for each in [*names, *kwargs] if each in kwargs)
        return args, {**kwargs, name: change(kwargs[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def last_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a module return ``change(activation)`` in place of its first tensor."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.register_forward_hook(hook)


def _guard(module: nn.Module, name: str, flow: Flow) -> None:
    """Let a module get what enters a region, and refuse one that passes its input by the matrices, as residuals do.

    The ranks' gradients of the input are added up, so that this part of them would count once for each rank.
    """
    entry: Any = None
    known = False

    def enter(activation: torch.Tensor) -> torch.Tensor:
        nonlocal entry
        result = flow.enter(activation)
        if not (known or torch.compiler.is_compiling()):
            entry = result.grad_fn
        return result

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal entry, known
        if torch.compiler.is_compiling():
            return
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        node = getattr(next(tensors, None), "grad_fn", None)
        if node is None:
            return
        if _passes_by(node, entry):
            raise ConfigurationError(
                f"Strategy: tp is {dist.get_world_size(flow.group)}; its matrices of {name!r} cannot be divided, because the"
                " module adds its input to their result, or multiplies both; leave them whole with the tensor_rules"
                f" (({re.sub(r'[.][0-9]+[.]', '.*.', name) + '.*'!r}, 'replicate'),), or do that outside of the module."
            )
        entry, known = None, True
        handle.remove()

    first_input(module, enter)
    handle = module.register_forward_hook(hook)


def _passes_by(node: Any, entry: Any) -> bool:
    """Return whether gradients go from a node to a region's entry without passing where activations leave a region."""
    seen, left = set(), [node]
    while left:
        one = left.pop()
        if one is None or one in seen or getattr(one, "leaves", False):
            continue
        if one is entry:
            return True
        seen.add(one)
        left += [each for each, _ in one.next_functions]
    return False


def _divide_region(block: nn.Module, region: Region, label: str, flow: Flow, mesh: DeviceMesh) -> None:  # fmt: skip
    module = block.get_submodule(region.name)
    plan: dict[str, _Style] = {}
    for name, parts in region.columns.items():
        plan[name] = _columns(flow, parts, enters=region.around, joins=False)
    for name in region.rows:
        plan[name] = _rows(flow)
    for name in region.inner:
        sum_gradients(module.get_submodule(name), flow)
    parallelize_module(module, mesh, plan)
    if not region.around:
        _guard(module, label, flow)
    for name in HEAD_COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int) and count % mesh.size() == 0:
            setattr(module, name, count // mesh.size())


def divide_block(block: nn.Module, label: str, regions: Regions, flow: Flow, mesh: DeviceMesh) -> None:  # fmt: skip
    """Divide the matrices of a block; what is outside of its regions sees the activations between them."""
    flows = {"": flow}
    for (
        name
    ) in regions.routers:  # tokens are always divided there, so that each meets its experts once
        flows[name] = flow if flow.divided else Flow(flow.group, divided=True)
        if not flow.divided:
            first_input(block.get_submodule(name), flows[name].begin)
            last_output(block.get_submodule(name), flows[name].end)

    def around(name: str) -> Flow:
        return next(
            (found for outer, found in flows.items() if outer and f"{name}.".startswith(f"{outer}.")),
            flow,
        )  # fmt: skip

    for region in regions.regions:
        _divide_region(block, region, f"{label}.{region.name}", around(region.name), mesh)
    for name in regions.outside:
        if around(name).divided:
            sum_gradients(block.get_submodule(name), around(name))


def spread_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make whole parameters DTensors, too: steps of optimizers take one kind only."""
    tied: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        rest = {name: item for name, item in own.items() if not isinstance(item, DTensor)}
        for name, whole in rest.items():
            if id(whole) not in tied:
                spread = DTensor.from_local(whole.detach(), mesh, [Replicate()], run_check=False)
                tied[id(whole)] = nn.Parameter(spread, whole.requires_grad)
            module.register_parameter(name, tied[id(whole)])
        if rest:
            computes_with(module, local)


def divide_ends(model: nn.Module, styles: Mapping[str, str], flow: Flow, mesh: DeviceMesh) -> None:
    """Divide the embedding and the output layer, which see whole sequences; tied ones stay tied."""
    whole = Flow(flow.group, divided=False)
    plan: dict[str, _Style] = {}
    for name, style in styles.items():
        if style == "vocabulary":
            plan[name] = _vocabulary(whole)
        else:
            plan[name] = _columns(whole, 1, enters=True, joins=True)
    tied: dict[int, nn.Parameter] = {}
    for name, style in plan.items():
        module = model.get_submodule(name)
        before = module.weight
        parallelize_module(model, mesh, {name: style})
        module.weight = tied.setdefault(id(before), module.weight)
