"""The ranks of this world, their device, and the groups that a strategy divides them into."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dlrover import config
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.planning.parallel.records import Strategy


def size() -> int:
    """Return the number of ranks, also before there is a process group."""
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    given = config.environ().get("WORLD_SIZE", "1")
    if not given.isdecimal() or not int(given):
        raise ConfigurationError(f"WORLD_SIZE is {given!r}; accepted is a positive integer.")
    return int(given)


def per_node() -> int:
    """Return the number of ranks on this node."""
    return int(config.environ().get("LOCAL_WORLD_SIZE", str(size())))


def device() -> torch.device:
    """Return this rank's device: its accelerator if there is one, else the processor."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    index = int(config.environ().get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    return torch.device(kind.type, index)


def join(where: torch.device) -> None:
    """Create the default process group if there are several ranks and the program has created none."""
    if where.type != "cpu":
        torch.accelerator.set_device_index(where.index)
    if size() > 1 and not dist.is_initialized():
        dist.init_process_group()


def check_same(strategy: Strategy, where: torch.device) -> None:
    """Check that all ranks have the same strategy. Collective.

    Ranks that could not reach the job's master, or reached another one that has lost its journal, may have chosen
    another one; they would wait for each other without an end.

    Raises:
        InfrastructureError: they have not.
    """
    if size() == 1:
        return
    content = msgspec.json.encode(strategy, order="sorted")
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")
    most = torch.tensor([digest, -digest], device=where)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if int(most.sum()):
        raise InfrastructureError(
            f"The ranks have chosen different strategies; this one has {strategy}."
        )


@dataclass(frozen=True)
class Grid:
    """The ranks as a grid of pipeline, data and tensor coordinates; those of tensor are nearest.

    Rank ``((p * R + r) * S + s) * T + t`` has the coordinates p, r, s, t of pipeline, copy, shard and tensor. Ranks
    of context parallelism are the nearest ones of the shards.
    """

    strategy: Strategy
    device: torch.device
    expert_ranks: int
    """Ranks that share the experts."""

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh with the dimensions pipeline, copies, shards and tensor."""
        one = self.strategy
        return self._mesh(("pp", one.pp), ("replicate", self.copies), ("shard", self.shards), ("tp", one.tp))  # fmt: skip

    @functools.cached_property
    def _contexts(self) -> DeviceMesh:
        one = self.strategy
        return self._mesh(("data", one.pp * one.dp), ("cp", one.cp), ("tensor", one.tp))

    @functools.cached_property
    def experts(self) -> DeviceMesh:
        """The mesh with the dimensions pipeline, copies and shards of the same experts, and experts."""
        one = self.strategy
        same = one.dp * one.cp * one.tp // self.expert_ranks
        copies, shards = (1, same) if self.shards > 1 else (same, 1)
        return self._mesh(("stages", one.pp), ("expert_replicate", copies), ("expert_shard", shards), ("ep", self.expert_ranks))  # fmt: skip

    def _mesh(self, *dimensions: tuple[str, int]) -> DeviceMesh:
        names, sizes = zip(*dimensions, strict=True)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=names)

    @property
    def sharded(self) -> bool:
        """True if states are sharded over ranks with the same stage and tensor coordinate."""
        return self.strategy.zero > 0 and self.strategy.dp_shard * self.strategy.cp > 1

    @property
    def shards(self) -> int:
        """Ranks over which states are sharded."""
        return self.strategy.dp_shard * self.strategy.cp if self.sharded else 1

    @property
    def copies(self) -> int:
        """Ranks that hold the same shards; they and ``shards`` average gradients."""
        return self.strategy.dp * self.strategy.cp // self.shards

    @property
    def data_rank(self) -> int:
        """Which part of a global batch this rank gets, below ``strategy.dp``."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        one = self.strategy
        return rank // (one.tp * one.cp) % one.dp

    @property
    def stage(self) -> int:
        """This rank's pipeline coordinate."""
        return int(self.mesh.get_local_rank("pp")) if self.strategy.pp > 1 else 0

    @property
    def tensor(self) -> Any:
        """The process group of the ranks that share matrices."""
        return self.mesh["tp"].get_group()

    @property
    def context(self) -> Any:
        """The process group of the ranks that share sequences."""
        return self._contexts["cp"].get_group()

    @property
    def pipeline(self) -> Any:
        """The process group of the ranks that have the stages of one copy."""
        return self.mesh["pp"].get_group()
