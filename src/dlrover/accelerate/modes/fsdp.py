"""Data parallelism: replicas that average gradients, or shards of states (``fully_shard``), or shards in replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dlrover.accelerate.modes.precision import DTYPES
from dlrover.accelerate.world import Grid


class Sharder:
    """Applies data parallelism to the parts of a model.

    ``fully_shard`` does it all; only where ranks hold whole models and share nothing else, it is
    ``DistributedDataParallel``, which overlaps its all-reduces with less work.
    """

    def __init__(self, grid: Grid, *, offload: bool) -> None:
        one = grid.strategy
        self._grid = grid
        self._offload = offload
        whole = one.tp == one.pp == grid.expert_ranks == 1 and not grid.sharded and not offload
        self.replicates = whole and grid.copies > 1
        """True if `replicate` is to be called for the whole model, and nothing else."""
        self.shards = not whole and (grid.copies * grid.shards > 1 or offload)
        """True if `shard` has to be called for each unit, and for the model at last."""
        self._options: dict[str, Any] = {"reshard_after_forward": one.zero == 3}
        if offload:
            pin = grid.device.type != "cpu"
            self._options["offload_policy"] = CPUOffloadPolicy(pin_memory=pin)

    @property
    def casts(self) -> bool:
        """True if sharding also casts parameters and inputs to the type of the matrix products."""
        return self.shards

    def shard(self, unit: nn.Module, *, root: bool = False) -> None:
        """Shard the parameters of a unit that no inner unit has."""
        if self.shards:
            names = ("replicate", "shard") if self._grid.copies > 1 else ("shard",)
            fully_shard(unit, mesh=self._grid.mesh[names], **self._policies(root))

    def shard_experts(self, experts: nn.Module) -> None:
        """Shard the parameters of experts over the ranks that have the same experts."""
        mesh = self._grid.experts["expert_replicate", "expert_shard"]
        if mesh.size() > 1 or self.shards:
            copies = mesh.size(0) > 1
            chosen = mesh if copies else self._grid.experts["expert_shard"]
            fully_shard(experts, mesh=chosen, **self._policies(root=False))

    def _policies(self, root: bool) -> dict[str, Any]:
        one = self._grid.strategy
        dtype = DTYPES.get(one.precision)
        if dtype is None:
            return self._options
        policy = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=dtype if one.gradient_bytes == 2 else torch.float32,
            output_dtype=torch.float32 if root and one.pp == 1 else None,
        )
        return {**self._options, "mp_policy": policy}

    def replicate(self, model: nn.Module, *, find_unused: bool) -> nn.Module:
        """Return a model whose backward pass averages gradients over all ranks."""
        devices = None if self._grid.device.type == "cpu" else [self._grid.device.index]
        return DistributedDataParallel(
            model, device_ids=devices, find_unused_parameters=find_unused
        )
