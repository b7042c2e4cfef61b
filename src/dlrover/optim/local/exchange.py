"""What replicas exchange at a sync: reports, sums of pseudo-gradients, and the state that one of them lacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

BLOCK = 256
"""Elements per scale in 8 bits."""


class SyncPeers:
    """The replicas of one sync.

    Args:
        group: process group with one rank per replica; None: this replica is alone.
        device: device of the tensors.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self._device = group, device
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """Return the numbers of each replica."""
        if self.size == 1:
            return [numbers]
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.group)
        return [each.tolist() for each in found]

    def spread(self, tensors: Iterable[torch.Tensor], source: int) -> None:
        """Overwrite all replicas' tensors with those of one."""
        for tensor in tensors:
            moved = tensor.to(self._device)
            dist.broadcast(moved, dist.get_global_rank(self.group, source), group=self.group)
            if moved is not tensor:
                tensor.copy_(moved)

    def sum(self, vector: torch.Tensor) -> Sum:
        """Begin to add up vectors, in place."""
        return Sum(self, vector)

    def sum_coded(self, vector: torch.Tensor, residuals: Residuals) -> CodedSum:
        """Begin to add up vectors in 8 bits."""
        return CodedSum(self, vector, residuals)


class Sum:
    """A sum over the replicas under way."""

    def __init__(self, peers: SyncPeers, vector: torch.Tensor) -> None:
        self._vector = vector
        self._work = None
        if peers.size > 1:
            self._work = dist.all_reduce(vector, group=peers.group, async_op=True)

    def result(self) -> torch.Tensor:
        """Wait for it."""
        if self._work is not None:
            self._work.wait()
        return self._vector


class Residuals:
    """What coding has cut off so far on this replica; it is added to the next vector (error feedback)."""

    def __init__(self) -> None:
        self.own: torch.Tensor | None = None
        """Of the vector that this replica sends."""
        self.summed: torch.Tensor | None = None
        """Of the part of the sum that this replica codes."""
        self.place: tuple[int, int] | None = None
        """Of ``summed``: this replica's number and the number of replicas. Replicas that come and go move the parts."""


class CodedSum:
    """A sum over the replicas under way, in one byte per element and a float32 per 256 of them.

    Each replica adds up one part of the vectors, in float32, and sends the sum, coded again, to all. So the others'
    bytes reach each replica about twice, on any number of replicas.
    """

    def __init__(self, peers: SyncPeers, vector: torch.Tensor, residuals: Residuals) -> None:
        self._peers, self._vector, self._residuals = peers, vector, residuals
        self._own: torch.Tensor | None = None
        if peers.size == 1:
            return
        if residuals.own is not None:
            vector = vector + residuals.own
        part = -(-len(vector) // (peers.size * BLOCK)) * BLOCK
        parts = functional.pad(vector, (0, part * peers.size - len(vector))).view(peers.size, part)
        sent = _coded(parts)
        self._own = (parts - _decoded(sent, part)).view(-1)[: len(vector)]
        self._received = torch.empty_like(sent)
        self._work = dist.all_to_all_single(self._received, sent, group=peers.group, async_op=True)
        self._part = part

    def result(self) -> torch.Tensor:
        """Wait for it; only then the residuals change."""
        if self._own is None:
            return self._vector
        self._work.wait()
        part, residuals = self._part, self._residuals
        place = self._peers.rank, self._peers.size
        total = _decoded(self._received, part).sum(0, keepdim=True)
        if residuals.summed is not None and residuals.place == place:
            total += residuals.summed
        coded = _coded(total)
        found = torch.empty_like(coded).repeat(self._peers.size, 1)
        dist.all_gather(list(found.split(1)), coded, group=self._peers.group)
        residuals.own, residuals.summed = self._own, total - _decoded(coded, part)
        residuals.place = place
        decoded = _decoded(found, part).view(-1)[: len(self._vector)]
        return self._vector.copy_(decoded)


def _coded(parts: torch.Tensor) -> torch.Tensor:
    """Return codes and scales of each row, as bytes of shape (rows, elements + 4 * blocks)."""
    blocks = parts.to(torch.float32).unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True).div_(127)
    codes = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([codes.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], 1)


def _decoded(coded: torch.Tensor, width: int) -> torch.Tensor:
    """Return the rows of ``width`` elements that `_coded` coded."""
    codes = coded[:, :width].contiguous().view(torch.int8).unflatten(1, (-1, BLOCK))
    scales = coded[:, width:].contiguous().view(torch.float32).unsqueeze(-1)
    return (codes * scales).flatten(1)
