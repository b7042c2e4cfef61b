"""What the planner of parallel strategies takes and returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.accelerators import TERMS
from dlrover.planning.parallel.huggingface import shape

Recompute = Literal["none", "selective", "full"]
"""What the backward pass computes again: nothing, cheap operations (attention, norms), or whole blocks."""
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
CONTEXTS = ("all_gather", "ulysses")
SCHEDULES = ("", "gpipe", "1f1b", "interleaved_1f1b")


MOST = (1 << 31) - 1
"""Largest size: a product of two is exact in 64 bits."""


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


def check_whole(least: int, of: str = "", /, **values: object) -> None:
    """Raise `ConfigurationError` for a value of a field that is no size."""
    for name, value in values.items():
        if not _is_whole(value, least):
            wanted = "a positive integer" if least else "an integer of 0 or more"
            wanted += f", at most {MOST}" if isinstance(value, int) and value > MOST else ""
            raise ConfigurationError(f"{of}{name} is {value!r}, not {wanted}.")


def _whole(record: object, least: int, *names: str) -> None:
    check_whole(least, f"{type(record).__name__}: ", **{name: getattr(record, name) for name in names})  # fmt: skip


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_residuals(values: Any) -> bool:
    return (
        isinstance(values, tuple)
        and all(map(_is_residual, values))
        and len({each[:3] for each in values}) == len(values)
    )


def _is_residual(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != len(Residual._fields):
        return False
    ranks, between, pipeline, factor = value
    flags = isinstance(between, bool) and isinstance(pipeline, bool)
    return _is_whole(ranks, 1) and flags and is_number(factor) and factor > 0


def _flags(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"{type(record).__name__}: {name} is {value!r}, not True or False."
            )


def _choice(record: object, name: str, accepted: tuple[str, ...]) -> None:
    value = getattr(record, name)
    if value not in accepted:
        raise ConfigurationError(
            f"{type(record).__name__}: {name} is {value!r}; accepted are {', '.join(map(repr, accepted))}."
        )


@dataclass(frozen=True)
class Transformer:
    """Shape of a decoder-only transformer."""

    layers: int
    hidden: int
    ffn: int
    """Width of the feed-forward layer; of one expert if there are experts."""
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False
    """True if the output layer shares the weights of the embedding."""
    gated: bool = True
    """True if the feed-forward layer has three matrices, as SwiGLU, and not two."""
    experts: int = 0
    """Experts of each layer; 0 for a dense model."""
    experts_per_token: int = 2
    shared_experts: int = 0
    """Experts of each layer that every token passes, in addition."""
    imbalance: float = 1.0
    """Tokens of the rank whose experts have most of them, as a multiple of the average."""
    head_dim: int = 0
    """Width of a head; 0 for ``hidden / heads``."""
    dense_layers: int = 0
    """Layers of a model with experts that have none."""
    dense_ffn: int = 0
    """Width of the feed-forward layer in ``dense_layers``."""
    q_lora: int = 0
    """With ``kv_lora``: width to which queries are compressed; 0 if they are not."""
    kv_lora: int = 0
    """Width to which keys and values are compressed in multi-head latent attention; 0 without it."""
    rope_dim: int = 0
    """With ``kv_lora``: what rotary embeddings add to the width of a head's query and key."""
    value_dim: int = 0
    """With ``kv_lora``: width of a head's value; 0 for that of a head."""
    kept: float = 0.0
    """Bytes of a token that a layer of the program keeps for its backward pass on one rank; 0 to count them."""
    fused: bool = False
    """True if the program computes a gated activation, and the loss, in one kernel each, as Megatron-LM can: both keep less."""
    copied_gradients: bool = False
    """True if the program copies its gradients to reduce them over the ranks of one ZeRO group, as nanotron does."""
    autocast: bool = False
    """True if the program keeps its weights in fp32 where it does not shard them, and autocast converts them, as PyTorch's own loops and
    `auto_accelerate` do; gradients exist from one backward pass to the next optimizer's step."""

    def __post_init__(self) -> None:
        _whole(self, 1, "layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
        _whole(
            self, 0, "experts", "experts_per_token", "shared_experts", "head_dim", "dense_layers"
        )
        _whole(self, 0, "dense_ffn", "q_lora", "kv_lora", "rope_dim", "value_dim")
        _flags(self, "tied", "gated", "fused", "copied_gradients", "autocast")
        if not (is_number(self.kept) and self.kept >= 0):
            raise ConfigurationError(
                f"Transformer: kept is {self.kept!r}, not a number of 0 or more."
            )
        if not (is_number(self.imbalance) and self.imbalance >= 1):
            raise ConfigurationError(
                f"Transformer: imbalance is {self.imbalance!r}, not a number of 1 or more."
            )
        if self.heads % self.kv_heads:
            raise ConfigurationError(
                f"Transformer: heads is {self.heads}, not a multiple of kv_heads {self.kv_heads}."
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ConfigurationError(
                f"Transformer: experts_per_token is {self.experts_per_token}, "
                f"not between 1 and experts {self.experts}."
            )
        if self.dense_layers > self.layers:
            raise ConfigurationError(
                f"Transformer: dense_layers is {self.dense_layers}, more than layers {self.layers}."
            )
        for name in ("q_lora", "rope_dim", "value_dim"):
            if getattr(self, name) and not self.kv_lora:
                raise ConfigurationError(
                    f"Transformer: {name} is {getattr(self, name)}: it needs kv_lora, which is 0."
                )

    @classmethod
    def of(cls, config: Any) -> Transformer:
        """Return the shape that a configuration of Hugging Face transformers describes.

        Args:
            config: The configuration, or the content of its ``config.json``.

        Raises:
            ConfigurationError: it lacks a size, or a size is wrong.
        """
        return cls(**shape(config))

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.head_dim or max(1, self.hidden // self.heads)

    @property
    def value_width(self) -> int:
        """Width of a head's value."""
        return self.value_dim or self.width

    @property
    def latent(self) -> int:
        """Width to which attention compresses all its inputs."""
        return self.q_lora + self.kv_lora + self.rope_dim

    @property
    def projections(self) -> tuple[int, int]:
        """Parameters of the matrices that make a layer's queries, keys and values, and of its output's."""
        output = self.hidden * self.heads * self.value_width
        queries = (self.q_lora or self.hidden) * self.heads * (self.width + self.rope_dim)
        if not self.kv_lora:
            return queries + 2 * self.hidden * self.kv_heads * self.width, output
        return queries + self.kv_lora * self.heads * (self.width + self.value_width), output

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention."""
        return self.hidden * self.latent + sum(self.projections)

    @property
    def expert(self) -> int:
        """Parameters of one expert, or of a dense model's feed-forward layer."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """Parameters in all."""
        each = self.attention + self.expert * max(1, self.experts + self.shared_experts)
        each += self.hidden * self.experts
        dense = (3 if self.gated else 2) * self.hidden * (self.dense_ffn or self.ffn)
        swapped = self.dense_layers * (self.attention + dense - each) if self.experts else 0
        return self.layers * each + swapped + self.vocab * self.hidden * (1 if self.tied else 2)


class Residual(NamedTuple):
    """How much longer than the time model says the steps of one kind of runs take."""

    ranks: int
    between: bool
    """True if the ranks that share a layer (tp and cp) are on several nodes."""
    pipeline: bool
    factor: float
    """Measured time as a multiple of the predicted one."""


@dataclass(frozen=True)
class Cluster:
    """Accelerators of one kind in equal nodes."""

    accelerator: str = "h100-80"
    """Name in the table of accelerators, such as ``a100-80``, ``h100-80``, ``h200``, ``b200``, ``910b``."""
    nodes: int = 1
    per_node: int = 8
    coefficients: tuple[float, ...] = ()
    """Coefficients of the time model; empty for the accelerator's defaults. :func:`calibrate` sets them."""
    spread: float = 0.0
    """Relative error of step times that 80 % of runs stay within; 0 for the default."""
    residuals: tuple[Residual, ...] = ()
    """Kinds of runs that were measured; :func:`calibrate` sets them."""

    def __post_init__(self) -> None:
        _whole(self, 1, "nodes", "per_node")
        given: Any = self.coefficients
        fits = isinstance(given, tuple) and all(is_number(each) and each >= 0 for each in given)
        if not fits or (given and (len(given) != len(TERMS) or not any(given))):
            raise ConfigurationError(
                f"Cluster: coefficients is {given!r}, not a tuple of {len(TERMS)} numbers of 0 or more, some above 0."
            )
        if not (is_number(self.spread) and self.spread >= 0):
            raise ConfigurationError(
                f"Cluster: spread is {self.spread!r}, not a number of 0 or more."
            )
        if not _are_residuals(self.residuals):
            raise ConfigurationError(
                f"Cluster: residuals is {self.residuals!r}, not a tuple of residuals of different kinds,"
                " each of positive ranks, between and pipeline (True or False), and a positive factor."
            )

    @property
    def size(self) -> int:
        """Accelerators in all."""
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Strategy:
    """A parallel strategy. The product of dp_replicate, dp_shard, tp, pp and cp is the number of ranks."""

    dp_replicate: int = 1
    """Copies of the model."""
    dp_shard: int = 1
    """Ranks over which each copy's states are sharded (ZeRO, FSDP)."""
    zero: int = 3
    """What is sharded over dp_shard and cp: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    tp: int = 1
    """Ranks that share each matrix."""
    pp: int = 1
    """Pipeline stages."""
    virtual: int = 1
    """Parts of the model that each pipeline rank holds (interleaved schedule)."""
    cp: int = 1
    """Ranks that share each sequence."""
    ep: int = 1
    """Ranks that share the experts; divides ``dp_replicate * dp_shard * cp``, or that times tp."""
    micro_batch: int = 1
    """Sequences in one forward pass of a rank."""
    recompute: Recompute = "none"
    recompute_layers: int = 0
    """Layers of each pipeline rank that are recomputed, the first ones; 0 for all."""
    sequence_parallel: bool = True
    """With tp: norms and dropout split the sequence, too."""
    offload: bool = False
    """True if the optimizer's state is in host memory."""
    optimizer_bytes: int = 12
    """Bytes a parameter of optimizer state and master weight: 12 for AdamW in fp32, 6 with 8-bit moments."""
    gradient_bytes: int = 4
    """Bytes of a parameter's gradient: 4 if it is added up in fp32, 2 in bf16."""
    chunked_loss: bool = False
    """True if logits and loss are computed in chunks of the sequence."""
    compile: bool = False
    precision: str = "bf16"
    """Type of matrix products: ``fp32``, ``bf16`` or ``fp16``, or ``fp8`` for those of layers and bf16 for the rest; parameters and the
    optimizer's state are in fp32."""
    context: str = "all_gather"
    """With cp: ``all_gather`` of keys and values, or ``ulysses``, which exchanges heads for positions."""
    schedule: str = ""
    """With pp: ``gpipe``, ``1f1b`` or ``interleaved_1f1b``; empty for the one that ``virtual`` needs."""
    tensor_rules: tuple[tuple[str, str], ...] = ()
    """With tp: patterns of module names and their styles, before those of the model and its family."""
    blocks: tuple[str, ...] = ()
    """Class names of the modules that are sharded and recomputed as units; empty for the repeated block."""

    def __post_init__(self) -> None:
        degrees = ("dp_replicate", "dp_shard", "tp", "pp", "virtual", "cp", "ep", "micro_batch")
        _whole(self, 1, *degrees)
        _whole(self, 0, "optimizer_bytes", "gradient_bytes", "recompute_layers")
        _flags(self, "sequence_parallel", "offload", "chunked_loss", "compile")
        if self.zero not in (0, 1, 2, 3):
            raise ConfigurationError(f"Strategy: zero is {self.zero!r}, not 0, 1, 2 or 3.")
        if self.recompute not in RECOMPUTE:
            raise ConfigurationError(
                f"Strategy: recompute is {self.recompute!r}, not 'none', 'selective' or 'full'."
            )
        _choice(self, "precision", PRECISIONS)
        _choice(self, "context", CONTEXTS)
        _choice(self, "schedule", SCHEDULES)

    @property
    def dp(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """Degrees of tensor, pipeline, context and expert parallelism, which decide the form of the model's parts."""
        return self.tp, self.pp, self.cp, self.ep


@dataclass(frozen=True)
class Prediction:
    """What a strategy needs and gives."""

    memory_gib: float
    """Reserved on the fullest rank."""
    memory_low: float
    memory_high: float
    """80 % of the runs that the model was checked on lie between low and high, each set of runs counting alike."""
    step_seconds: float
    tokens_per_second: float
    """Of one accelerator."""
    fits: bool
    reason: str = ""
    """Why it does not fit: the first rule broken, with its numbers; empty if it fits."""
    active_gib: float = 0.0
    """Allocated on the fullest rank at its peak; the allocator reserves ``memory_gib`` for it."""
    step_low: float = 0.0
    step_high: float = 0.0
    """80 % of the runs that the model was checked on take between low and high."""
    stage: int = 0
    """Pipeline stage of the fullest rank."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """GiB of the fullest rank by purpose; they add up to ``memory_gib``."""


class Observation(NamedTuple):
    """A measured step of a job."""

    model: Transformer
    strategy: Strategy
    sequence: int
    global_batch: int
    step_seconds: float
