"""What a model consists of: its repeated blocks, what comes before and after them, what it shares and keeps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.huggingface import EXPERTS, KV_HEADS, NAMES
from dlrover.planning.parallel.records import Transformer


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model."""

    list_name: str
    """Name of the list of blocks; empty if there is none."""
    blocks: tuple[str, ...]
    """Names of the blocks, in order."""
    again: str = ""
    """Name of the first block that is an earlier one once more; empty if there is none."""
    scalar: str = ""
    """Name of the first parameter without a dimension; empty if there is none."""
    classes: frozenset[str] = frozenset()
    """Names of the classes of its modules."""
    before: tuple[str, ...] = ()
    """Names of the modules that run before the blocks: those registered before them."""
    after: tuple[str, ...] = ()
    """Names of the modules that run after the blocks: those registered after them."""
    loose: tuple[str, ...] = ()
    """Parameters of the modules that the blocks are in, and modules before the blocks for which nothing can stand in."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of names of one parameter."""
    shared: str = ""
    """Name of the first parameter of a block that has another name, too; empty if there is none."""
    across: str = ""
    """The same, of a parameter that the block shares with what is outside of it."""
    experts: tuple[str, ...] = ()
    """Names of the modules with experts: each parameter has one row of matrices for each expert."""
    heads: int = 0
    """Attention heads; 0 if the model does not say."""
    kv_heads: int = 0
    expert_count: int = 0
    router_loss: bool = False
    """Whether the model adds a loss of its routers, over all blocks."""
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(
        default_factory=dict, compare=False
    )
    """Sizes and types of the parameters and the persistent buffers, each by the first of its names."""
    trained: tuple[str, ...] = field(default=(), compare=False)
    """Names of the parameters that need gradients."""
    transformer: Transformer | None = field(default=None, compare=False)
    """Its shape, if its configuration describes one."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the parameters and of an optimizer with two moments for each, on all ranks together."""
        sizes = (math.prod(shape) * int(dtype.itemsize) for shape, dtype in self.shapes.values())
        return 3 * sum(sizes)


def analyse(model: nn.Module, list_name: str | None = None) -> Anatomy:
    """Return the parts of a model.

    Args:
        model: any module; with a Hugging Face ``config`` more is known about it.
        list_name: name of the list of blocks; by default the list of equal modules with most parameters.

    Raises:
        ConfigurationError: there is no list of that name.
    """
    modules = dict(model.named_modules())
    if list_name is None:
        list_name = _largest_list(modules)
    elif not isinstance(modules.get(list_name), nn.ModuleList | nn.Sequential):
        lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]
        raise ConfigurationError(
            f"blocks is {list_name!r}; accepted are the model's lists: {', '.join(lists) or 'none'}."
        )
    config = getattr(model, "config", None)
    blocks = tuple(f"{list_name}.{name}" for name, _ in modules[list_name].named_children()) if list_name else ()  # fmt: skip
    before, after = _around(model, list_name) if list_name else ((), ())
    experts = tuple(name for name, module in modules.items() if is_experts(module))
    tied = _tied(model)
    shared, across = _shared(modules[list_name], list_name, tied) if list_name else ("", "")
    return Anatomy(
        list_name=list_name,
        blocks=blocks,
        scalar=next((name for name, item in model.named_parameters() if not item.dim()), ""),
        again=_again(modules[list_name], list_name) if list_name else "",
        classes=frozenset(type(module).__name__ for module in modules.values()),
        before=before,
        after=after,
        loose=_loose(model, list_name, before) if list_name else (),
        tied=tied,
        shared=shared,
        across=across,
        experts=experts,
        heads=_size(config, NAMES["heads"]),
        kv_heads=_size(config, KV_HEADS) or _size(config, NAMES["heads"]),
        expert_count=_size(config, EXPERTS) or _expert_count(modules, experts),
        router_loss=bool(getattr(config, "output_router_logits", False)),
        shapes=_shapes(model),
        trained=tuple(name for name, item in model.named_parameters() if item.requires_grad),
        transformer=_shape(config),
    )


def _again(blocks: nn.Module, list_name: str) -> str:
    seen: set[int] = set()
    for name, block in blocks._modules.items():  # noqa: SLF001 - named_children leaves out the same one
        if id(block) in seen:
            return f"{list_name}.{name}"
        seen.add(id(block))
    return ""


def _shared(blocks: nn.Module, list_name: str, tied: tuple[tuple[str, ...], ...]) -> tuple[str, str]:  # fmt: skip
    """Return the first tied parameter that is in a block, and the first that is also in no or another block."""
    of_prefix = {f"{list_name}.{name}.": id(block) for name, block in blocks._modules.items()}  # noqa: SLF001
    shared = across = ""
    for group in tied:
        homes = {name: next((of_prefix[each] for each in of_prefix if name.startswith(each)), 0) for name in group}  # fmt: skip
        inside = next((name for name, home in homes.items() if home), "")
        shared = shared or inside
        if len(set(homes.values())) > 1:
            across = across or inside
    return shared, across


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is a set of experts, called as ``(hidden, expert of each token, weight)``."""
    own = list(module.parameters(recurse=False))
    rows = {parameter.shape[:1] for parameter in own}
    return (
        len(own) > 1
        and len(rows) == 1
        and any(parameter.dim() == 3 for parameter in own)
        and all(parameter.dim() >= 2 for parameter in own)
        and hasattr(module, "num_experts")
    )


def _expert_count(modules: dict[str, nn.Module], experts: tuple[str, ...]) -> int:
    return int(modules[experts[0]].num_experts) if experts else 0


def _largest_list(modules: dict[str, nn.Module]) -> str:
    """Return the name of the list of at least two modules of one class that has most parameters."""
    sizes: dict[str, int] = {}
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            kinds = {type(item) for item in module}
            size = sum(parameter.numel() for parameter in module.parameters())
            if len(kinds) == 1 and size:
                sizes[name] = size
    # Of a list and a list in its items, the outer one has at least as many.
    return max(sizes, key=lambda name: (sizes[name], -name.count(".")), default="")


def _around(model: nn.Module, list_name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the modules that were registered before and after the blocks."""
    before: list[str] = []
    after: list[str] = []
    path = list_name.split(".")
    module = model
    for depth, step in enumerate(path):
        prefix = ".".join(path[:depth])
        seen = False
        for name, _ in module.named_children():
            if name == step:
                seen = True
            else:
                (after if seen else before).append(f"{prefix}.{name}" if prefix else name)
        module = module.get_submodule(step)
    return tuple(before), tuple(after)


def _loose(model: nn.Module, list_name: str, before: tuple[str, ...]) -> tuple[str, ...]:
    found = []
    path = list_name.split(".")[:-1]
    for depth in range(len(path) + 1):
        prefix = ".".join(path[:depth])
        for name, _ in model.get_submodule(prefix).named_parameters(prefix, recurse=False):
            found.append(name)
    for outer in before:
        for name, module in model.get_submodule(outer).named_modules(prefix=outer):
            known = isinstance(module, nn.Embedding | nn.Linear) or "Norm" in type(module).__name__
            if not known and any(True for _ in module.parameters(recurse=False)):
                found.append(name)
    return tuple(found)


def _shapes(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    first: dict[int, str] = {}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and first.setdefault(id(tensor), name) == name:
            found[name] = (tuple(tensor.shape), tensor.dtype)
    return found


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _size(config: Any, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0


def _shape(config: Any) -> Transformer | None:
    if config is None:
        return None
    try:
        return Transformer.of(config)
    except ConfigurationError:  # the configuration of something else
        return None


# ---- what a layer keeps for its backward pass, by a trace without memory or device

SEQUENCE = 512
"""Tokens of the traced sequence: what a layer keeps grows with them in proportion, with fused attention."""


def traced(
    shape: Transformer, make: Callable[[int], nn.Module], *, sequence: int = SEQUENCE
) -> Transformer:
    """Return ``shape`` with the bytes that a layer of the program keeps, for :func:`predict` and :func:`search`.

    Models of one and of two layers are made and run forward in bf16 on fake tensors, which have shapes and no
    memory; the difference is one layer. A layer of a 405B model takes seconds.

    Args:
        shape: The model's shape.
        make: Makes the model with a given number of layers. It takes a batch of token ids.
        sequence: Tokens of the traced sequence.

    Raises:
        ConfigurationError: two layers keep no more than one.
    """
    one, two = (_kept(make, layers, sequence) for layers in (1, 2))
    if two <= one:
        raise ConfigurationError(
            f"traced: models of 1 and 2 layers keep {one} and {two} bytes: make must add a layer."
        )
    return replace(shape, kept=(two - one) / sequence)


def _kept(make: Callable[[int], nn.Module], layers: int, sequence: int) -> int:
    """Bytes that the forward pass of a model keeps, without its parameters."""
    sizes: dict[int, int] = {}
    tensors: list[torch.Tensor] = []  # alive, so that no storage has the address of an earlier one

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()  # noqa: SLF001 - fake tensors have no address
        tensors.append(tensor)
        return tensor

    with FakeTensorMode():
        model = _in_bf16(make, layers)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = model(torch.zeros(1, sequence, dtype=torch.long))
    parameters = {each.untyped_storage()._cdata for each in model.parameters()}  # noqa: SLF001
    del outputs
    return sum(size for address, size in sizes.items() if address not in parameters)


def _in_bf16(make: Callable[[int], nn.Module], layers: int) -> nn.Module:
    """A model in bf16: fake parameters cannot change their type later."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make(layers)
    finally:
        torch.set_default_dtype(before)
