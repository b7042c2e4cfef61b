"""Many strategies at once, as one array per field. Needs numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dlrover.planning.parallel.records import PRECISIONS, RECOMPUTE, Cluster, Strategy

CODED: Mapping[str, tuple[str, ...]] = {"recompute": RECOMPUTE, "precision": PRECISIONS}
"""Fields whose values are indices into the accepted ones."""


@dataclass(frozen=True)
class Columns:
    """Strategies, one per element of each array; those of ``CODED`` are indices."""

    dp_replicate: Any
    dp_shard: Any
    zero: Any
    tp: Any
    pp: Any
    virtual: Any
    cp: Any
    ep: Any
    micro_batch: Any
    recompute: Any
    recompute_layers: Any
    sequence_parallel: Any
    offload: Any
    optimizer_bytes: Any
    gradient_bytes: Any
    chunked_loss: Any
    compile: Any
    precision: Any

    @classmethod
    def of(cls, strategies: Sequence[Strategy]) -> Columns:
        """Return the columns of some strategies."""
        values = {
            field.name: np.array([getattr(each, field.name) for each in strategies])
            for field in fields(cls)
            if field.name not in CODED
        }
        for name, accepted in CODED.items():
            values[name] = np.array([accepted.index(getattr(each, name)) for each in strategies])
        return cls(**values)

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, index: Any) -> Columns:
        """Return some of the strategies, by a mask or by indices."""
        return Columns(**{name.name: getattr(self, name.name)[index] for name in fields(self)})

    def strategy(self, index: int) -> Strategy:
        """Return one of the strategies."""
        values = {name.name: getattr(self, name.name)[index].item() for name in fields(self)}
        named = {name: accepted[values[name]] for name, accepted in CODED.items()}
        return Strategy(**{**values, **named})

    @property
    def fp8(self) -> Any:
        """True where layers' matrix products are in fp8."""
        return self.precision == PRECISIONS.index("fp8")

    @property
    def dp(self) -> Any:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def size(self) -> Any:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def shards(self) -> Any:
        """Ranks over which each copy's states are sharded: those of context parallelism count, too."""
        return self.dp_shard * self.cp

    @property
    def stage(self) -> Any:
        """ZeRO's stage, or 0 where there is nothing to shard over."""
        return np.where(self.shards > 1, self.zero, 0)

    def recomputed(self, layers: Any) -> Any:
        """Part of a rank's layers that are recomputed."""
        some = np.minimum(self.recompute_layers, layers) / np.maximum(layers, 1)
        return np.where(self.recompute_layers > 0, some, 1.0)

    def rounds(self, global_batch: int) -> Any:
        """Micro-batches of a step, on each rank."""
        return np.maximum(1, -(-global_batch // (self.dp * self.micro_batch)))

    def expert_tensor(self) -> Any:
        """Ranks that share one expert's matrices.

        Tensor parallelism splits experts as it splits all else, unless the experts' ranks include its own.
        """
        return np.where((self.dp * self.cp) % self.ep == 0, self.tp, 1)


@dataclass(frozen=True)
class RankGroup:
    """Where the ranks of a collective are. Ranks of tp are nearest, then those of cp, dp and pp."""

    size: Any
    between: Any
    """True if the group spans nodes."""
    near: Any
    """Ranks of the group in one node."""

    @classmethod
    def of(cls, size: Any, stride: Any, cluster: Cluster) -> RankGroup:
        """Return the group of ``size`` ranks that are ``stride`` apart."""
        near = np.clip(cluster.per_node // np.maximum(stride, 1), 1, size)
        return cls(size, size * stride > cluster.per_node, near)
