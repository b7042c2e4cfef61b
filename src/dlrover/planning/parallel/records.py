"""What the planner of parallel strategies takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlrover.errors import ConfigurationError

Recompute = Literal["none", "selective", "full"]
"""What the backward pass computes again: nothing, cheap operations (attention, norms), or whole blocks."""


def _positive(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(
                f"{type(record).__name__}: {name} is {value!r}, not a positive integer."
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
    head_dim: int = 0
    """Width of a head; 0 for ``hidden / heads``."""

    def __post_init__(self) -> None:
        _positive(self, "layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
        if self.heads % self.kv_heads:
            raise ConfigurationError(
                f"Transformer: heads is {self.heads}, not a multiple of kv_heads {self.kv_heads}."
            )


@dataclass(frozen=True)
class Cluster:
    """Accelerators of one kind in equal nodes."""

    accelerator: str = "h100-80"
    """Name in the table of accelerators, such as ``a100-80``, ``h100-80``, ``h200``, ``b200``, ``910b``."""
    nodes: int = 1
    per_node: int = 8
    coefficients: tuple[float, ...] = ()
    """Coefficients of the time model; empty for the accelerator's defaults. :func:`calibrate` sets them."""

    def __post_init__(self) -> None:
        _positive(self, "nodes", "per_node")

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
    """What is sharded over dp_shard: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    tp: int = 1
    """Ranks that share each matrix."""
    pp: int = 1
    """Pipeline stages."""
    virtual: int = 1
    """Parts of the model that each pipeline rank holds (interleaved schedule)."""
    cp: int = 1
    """Ranks that share each sequence."""
    ep: int = 1
    """Ranks that share the experts; divides ``dp_replicate * dp_shard * cp``."""
    micro_batch: int = 1
    """Sequences in one forward pass of a rank."""
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    """With tp: norms and dropout split the sequence, too."""
    offload: bool = False
    """True if the optimizer's state is in host memory."""
    optimizer_bytes: int = 12
    """Bytes a parameter of optimizer state and master weight: 12 for AdamW in fp32, 6 with 8-bit moments."""
    chunked_loss: bool = False
    """True if logits and loss are computed in chunks of the sequence."""
    compile: bool = False

    def __post_init__(self) -> None:
        _positive(
            self, "dp_replicate", "dp_shard", "tp", "pp", "virtual", "cp", "ep", "micro_batch"
        )
        if self.zero not in (0, 1, 2, 3):
            raise ConfigurationError(f"Strategy: zero is {self.zero!r}, not 0, 1, 2 or 3.")
        if self.recompute not in ("none", "selective", "full"):
            raise ConfigurationError(
                f"Strategy: recompute is {self.recompute!r}, not 'none', 'selective' or 'full'."
            )

    @property
    def dp(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True)
class Prediction:
    """What a strategy needs and gives."""

    memory_gib: float
    """Reserved on the fullest rank."""
    memory_low: float
    memory_high: float
    """80 % of the runs that the model was checked on lie between low and high."""
    step_seconds: float
    tokens_per_second: float
    """Of one accelerator."""
    fits: bool
    reason: str = ""
    """Why it does not fit: the first rule broken, with its numbers; empty if it fits."""
