"""Collectives through which gradients pass, on tensors whose division by ranks may be uneven.

``Parts`` says how one dimension is divided. A tensor is *whole* if all ranks have it and compute the same gradient
for it; it is *partial* if a rank's gradient is only its own addend of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Parts:
    """The division of a dimension: which of its indices each rank of a group has."""

    group: Any
    dim: int
    indices: tuple[torch.Tensor, ...]
    """The indices of each rank, which together are those of the dimension."""
    ordered: bool = False
    """True if the ranks' indices follow each other."""

    @classmethod
    def equal(cls, size: int, group: Any, dim: int, device: torch.device) -> Parts:
        """Divide a dimension in nearly equal runs."""
        ranks = dist.get_world_size(group)
        return cls(group, dim, torch.arange(size, device=device).tensor_split(ranks), True)

    @property
    def mine(self) -> torch.Tensor:
        """This rank's indices."""
        return self.indices[dist.get_rank(self.group)]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor."""
        return tensor.index_select(self.dim, self.mine)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensor of all ranks' parts. Collective."""
        parts = _gather(part.movedim(self.dim, 0), [len(index) for index in self.indices], self.group)  # fmt: skip
        if self.ordered:
            return parts.movedim(0, self.dim).contiguous()
        whole = torch.empty_like(parts)
        whole[torch.cat(self.indices)] = parts
        return whole.movedim(0, self.dim).contiguous()

    def reduce(self, addend: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum of all ranks' tensors. Collective."""
        rows = addend.movedim(self.dim, 0)
        mine = _scatter_sum([rows[index] for index in self.indices], self.group)
        return mine.movedim(0, self.dim).contiguous()


def _gather(rows: torch.Tensor, sizes: Sequence[int], group: Any) -> torch.Tensor:
    """Return the rows of all ranks; ``sizes`` has the number of each rank."""
    most = max(sizes)
    padded = torch.zeros(most, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    padded[: len(rows)] = rows
    found = torch.empty(len(sizes) * most, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    _all_gather(found, padded, group=group)
    return torch.cat([found[rank * most : rank * most + size] for rank, size in enumerate(sizes)])


def _scatter_sum(pieces: Sequence[torch.Tensor], group: Any) -> torch.Tensor:
    """Return the sum of what the ranks have for this rank."""
    most = max(len(piece) for piece in pieces)
    first = pieces[0]
    padded = torch.zeros(len(pieces), most, *first.shape[1:], dtype=first.dtype, device=first.device)  # fmt: skip
    for rank, piece in enumerate(pieces):
        padded[rank, : len(piece)] = piece
    found = torch.empty_like(padded[0])
    _reduce_scatter(found, padded.flatten(0, 1), group=group)
    return found[: len(pieces[dist.get_rank(group)])]


Step = Callable[[torch.Tensor], torch.Tensor]


class _Through(torch.autograd.Function):  # type: ignore[misc]
    """A step forward, and another one for gradients."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, ahead: Step, back: Step) -> torch.Tensor:
        context.back = back
        result = ahead(tensor)
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return context.back(gradient), None, None


def through(tensor: torch.Tensor, ahead: Step, back: Step) -> torch.Tensor:
    """Return ``ahead(tensor)``, whose gradients pass ``back``."""
    result: torch.Tensor = _Through.apply(tensor, ahead, back)
    return result


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself."""
    return tensor


def total(group: Any) -> Step:
    """Return the step that adds up all ranks' tensors."""

    def step(tensor: torch.Tensor) -> torch.Tensor:
        summed = tensor.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    return step


def split(whole: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Whole to parts: a rank takes its own."""
    return through(whole, parts.take, parts.gather)


def join(part: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Parts to whole."""
    return through(part, parts.gather, parts.take)


def gather(part: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Parts to partial: all ranks get the tensor, and each does something else with it."""
    return through(part, parts.gather, parts.reduce)


def reduce_parts(addend: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Addends to parts of their sum."""
    return through(addend, parts.reduce, parts.gather)


def enter(whole: torch.Tensor, group: Any) -> torch.Tensor:
    """Whole to partial: each rank does something else with the tensor that all have."""
    return through(whole, same, total(group))


def reduce(addend: torch.Tensor, group: Any) -> torch.Tensor:
    """Addends to their whole sum."""
    return through(addend, total(group), same)


def computes_with(module: nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Let a module compute with ``change(name, parameter)`` in place of each of its own parameters.

    The parameters themselves stay, with their names: what shards, optimizes or saves them sees no difference.
    """
    inner = module.forward
    own = module._parameters  # noqa: SLF001 - attributes are looked up here

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = dict(own)
        try:
            own.update({name: change(name, value) for name, value in kept.items() if value is not None})  # fmt: skip
            return inner(*args, **kwargs)
        finally:
            own.update(kept)

    module.forward = forward


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    """Send ``sent[r]`` rows to each rank r, and return those that come from all ranks, in their order."""

    def step(outgoing: list[int], incoming: list[int]) -> Step:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            found = tensor.new_empty(sum(incoming), *tensor.shape[1:])
            dist.all_to_all_single(found, tensor.contiguous(), incoming, outgoing, group=group)
            return found

        return move

    return through(rows, step(sent, received), step(received, sent))
