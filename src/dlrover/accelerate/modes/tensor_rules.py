"""Which matrices tensor parallelism divides, and how: overrides, the model's own plan, then names of families."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dlrover.accelerate.anatomy import is_experts
from dlrover.errors import ConfigurationError

STYLES = ("colwise", "packed_colwise", "packed_colwise:N", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicate")  # fmt: skip
"""Styles of a rule; N is the number of matrices that lie side by side."""
OF_PLANS = {
    "colwise_rep": "colwise_gather_output",
    "packed_colwise": "packed_colwise:2",
    "rowwise_rep": "rowwise",
}
"""Other names of styles, in the plans of Hugging Face's configurations. What is not a style there is not divided."""
FAMILIES = {
    "colwise": "q_proj k_proj v_proj query key value query_key_value wq wk wv q k v gate_proj up_proj w1 w3 fc1 c_fc "
    "fc_in linear1 lin1 wi wi_0 wi_1 up gate dense_h_to_4h",
    "packed_colwise:3": "c_attn qkv qkv_proj Wqkv in_proj",
    "packed_colwise:2": "gate_up_proj",
    "rowwise": "o_proj out_proj wo o down_proj w2 fc2 c_proj fc_out linear2 lin2 down dense_4h_to_h dense proj",
}
"""Last parts of names, by style."""
_BY_NAME = {name: style for style, names in FAMILIES.items() for name in names.split()}


@dataclass
class Region:
    """A module whose matrices are divided; names are relative to it."""

    name: str
    """Relative to the block; empty for the block itself."""
    columns: dict[str, int] = field(default_factory=dict)
    """Matrices divided by columns, and how many lie side by side in each."""
    rows: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)
    """Other modules with parameters."""
    around: bool = False
    """True if it is the block itself, or has another region in it: then each matrix gets the activation for itself."""


@dataclass(frozen=True)
class Regions:
    """What is divided in a block."""

    regions: tuple[Region, ...]
    outside: tuple[str, ...]
    """Modules with parameters in no region, relative to the block; without experts, which are divided otherwise."""
    routers: tuple[str, ...]
    """Modules that experts are in."""


class Rules:
    """The styles of a model's modules."""

    def __init__(self, model: nn.Module, overrides: Iterable[tuple[str, str]]) -> None:
        """Collect the rules.

        Raises:
            ConfigurationError: a style is unknown, or an override matches no module.
        """
        self._rules = list(overrides)
        names = [name for name, _ in model.named_modules()]
        for pattern, style in self._rules:
            if re.sub(r":\d+$", ":N", style) not in STYLES:
                raise ConfigurationError(
                    f"Strategy: tensor_rules has the style {style!r} for {pattern!r}; accepted are {', '.join(STYLES)}."
                )
            if not fnmatch.filter(names, pattern):
                raise ConfigurationError(
                    f"Strategy: tensor_rules has the pattern {pattern!r}, which matches no module of the"
                    f" {type(model).__name__}."
                )
        self._plan = _own_plan(model)

    def style(self, name: str, module: nn.Module) -> str:
        """Return a module's style; empty if it has none."""
        for pattern, style in self._rules:
            if fnmatch.fnmatch(name, pattern):
                return style
        if self._plan:
            wildcard = re.sub(r"\.\d+(?=\.|$)", ".*", name)
            found = self._plan.get(wildcard, "")
            found = OF_PLANS.get(found, found)
            return found if re.sub(r":\d+$", ":N", found) in STYLES else ""
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            return _BY_NAME.get(name.rpartition(".")[2], "")
        return ""

    def regions(self, block_name: str, block: nn.Module, ranks: int) -> Regions:
        """Return what is divided in a block: modules with both columns and rows, if ``ranks`` divides all of them."""
        styles = {}
        for name, module in block.named_modules():
            style = self.style(f"{block_name}.{name}", module)
            if style and style != "replicate" and _divides(module, style, ranks):
                styles[name] = style
        by_parent: dict[str, Region] = {}
        for name, style in styles.items():
            parent, _, last = name.rpartition(".")
            region = by_parent.setdefault(parent, Region(parent))
            if style == "rowwise":
                region.rows.append(last)
            elif style.startswith(("colwise", "packed")):
                region.columns[last] = int(style.partition(":")[2] or 1)
        chosen = [region for region in by_parent.values() if region.columns and region.rows]
        for region in chosen:
            others = (each.name for each in chosen if each is not region)
            region.around = not region.name or any(name.startswith(f"{region.name}.") for name in others)  # fmt: skip
        routers = {
            name.rpartition(".")[0] for name, module in block.named_modules() if is_experts(module)
        }
        return Regions(tuple(chosen), tuple(_outside(block, chosen)), tuple(sorted(routers)))

    def check(self, model: nn.Module, blocks: Iterable[str], ranks: int) -> None:
        """Check that some matrix can be divided.

        Raises:
            ConfigurationError: none can.
        """
        found = [(name, model.get_submodule(name)) for name in blocks]
        for name, block in found:
            regions = self.regions(name, block, ranks)
            if regions.regions or regions.routers:
                return
        raise ConfigurationError(
            f"Strategy: tp is {ranks}; accepted is 1 without tensor_rules, because no rule knows a pair of matrices"
            f" that {ranks} ranks divide in the blocks of the {type(model).__name__}."
        )

    def whole_attention(self, model: nn.Module, blocks: Iterable[str], ranks: int) -> str:
        """Return a module that may be attention and is not divided, so that it needs whole sequences; or nothing."""
        for name in blocks:
            block = model.get_submodule(name)
            found = _attention(block, self.regions(name, block, ranks))
            if found is not None:
                return f"{name}.{found}"
        return ""

    def ends(self, model: nn.Module, names: Iterable[str], ranks: int) -> dict[str, str]:
        """Return the styles of the embedding and the output layer among the named modules and those in them."""
        found = {}
        for outer in names:
            for inner, module in model.get_submodule(outer).named_modules(prefix=outer):
                rows = getattr(getattr(module, "weight", None), "shape", (0,))[0]
                style = self.style(inner, module)
                if style == "replicate" or not rows or rows % ranks:
                    continue
                if isinstance(module, nn.Embedding) and _is_vocabulary(model, module):
                    found[inner] = "vocabulary" if _looks_up(module) else "whole"
                elif isinstance(module, nn.Linear) and (
                    style == "colwise_gather_output" or _is_vocabulary(model, module)
                ):
                    found[inner] = "columns"
        whole = {id(model.get_submodule(name).weight) for name in found if found[name] == "whole"}
        return {name: style for name, style in found.items() if id(model.get_submodule(name).weight) not in whole}  # fmt: skip


def _attention(block: nn.Module, regions: Regions) -> str | None:
    """Return a module outside of all regions that may be attention, with three matrices or more; None if there is none."""
    matrices: dict[str, int] = {}
    for name in regions.outside:
        module = block.get_submodule(name)
        if isinstance(module, nn.MultiheadAttention | nn.Conv1d):
            return name
        if any(name.startswith(f"{router}.") for router in regions.routers):
            continue
        if len(getattr(getattr(module, "weight", None), "shape", ())) == 2:
            parent, _, last = name.rpartition(".")
            packed = _BY_NAME.get(last) == "packed_colwise:3"
            matrices[parent] = matrices.get(parent, 0) + (3 if packed else 1)
    return next((parent for parent, count in matrices.items() if count >= 3), None)


def _looks_up(module: nn.Embedding) -> bool:
    """Return whether an embedding does nothing else: Gemma's, for example, scales what it finds."""
    own = type(module).forward is not nn.Embedding.forward
    return not (own or module.max_norm is not None or module.scale_grad_by_freq or module.sparse)


def _is_vocabulary(model: nn.Module, module: Any) -> bool:
    """Return whether a module has a row for each word: at least as many as any other embedding."""
    sizes: list[int] = [
        item.num_embeddings for item in model.modules() if isinstance(item, nn.Embedding)
    ]
    shape: tuple[int, ...] = tuple(module.weight.shape)
    return bool(len(shape) == 2 and shape[0] == max(sizes, default=0))


def _divides(module: Any, style: str, ranks: int) -> bool:
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2:
        return False
    outputs, inputs = weight.shape if type(module).__name__ != "Conv1D" else weight.T.shape
    parts = int(style.partition(":")[2] or 1)
    return bool((inputs if style == "rowwise" else outputs) % (parts * ranks) == 0)


def _outside(block: nn.Module, regions: list[Region]) -> list[str]:
    """Return the modules with parameters in no region; note in each region what else it has."""
    outside = []
    divided = {
        f"{region.name}.{name}".lstrip(".")
        for region in regions
        for name in [*region.columns, *region.rows]
    }
    for name, module in block.named_modules():
        own = any(True for _ in module.parameters(recurse=False))
        if name in divided or not own or is_experts(module):
            continue
        for region in regions:
            if not region.around and name.startswith(f"{region.name}."):
                region.inner.append(name.removeprefix(f"{region.name}."))
                break
        else:
            outside.append(name)
    return outside


def _own_plan(model: nn.Module) -> Mapping[str, str]:
    """Return the plan of a Hugging Face model's configuration, with the names of the whole model."""
    config = getattr(model, "config", None)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and hasattr(model, prefix):
        plan = {f"{prefix}.{name}": style for name, style in plan.items()}
    return {**plan, **(getattr(type(model), "_tp_plan", None) or {})}
