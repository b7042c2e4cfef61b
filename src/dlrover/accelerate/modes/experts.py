"""Expert parallelism: the experts of a layer are dealt over ranks, and tokens travel to their experts and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrover.accelerate.modes import collectives
from dlrover.accelerate.modes.collectives import computes_with, exchange
from dlrover.accelerate.modes.tensor import local, shard
from dlrover.accelerate.world import Grid


def divide_experts(experts: nn.Module, grid: Grid) -> None:
    """Give each rank some of the experts.

    A module of experts is called with tokens ``[n, hidden]``, and ``[n, k]`` numbers of experts and weights. Its
    parameters have one row for each expert. Each rank passes other tokens, also those of tensor parallelism, and
    each of the latter knows only its tokens' part of the gradient of one loss.
    """
    ranks = grid.expert_ranks
    factor = (
        grid.strategy.tp / ranks
    )  # the ranks with the same experts average; all others must add up
    mesh = grid.experts["ep"]
    if ranks > 1:
        for name, _ in list(experts.named_parameters(recurse=False)):
            shard(experts, name, mesh, 0)

    def change(name: str, parameter: Any) -> Any:
        return collectives.through(local(name, parameter), collectives.same, lambda gradient: gradient * factor)  # fmt: skip

    computes_with(experts, change)
    if ranks == 1:
        return
    experts.num_experts = experts.num_experts // ranks
    group, inner, each = mesh.get_group(), experts.forward, int(experts.num_experts)

    def forward(tokens: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        order = index.flatten().argsort(stable=True)
        source = order // index.shape[1]
        chosen = index.flatten()[order]
        sent = torch.bincount(chosen // each, minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        there, here = sent.tolist(), received.tolist()
        arrived = exchange(tokens[source], there, here, group)
        which = exchange(chosen, there, here, group) % each
        if len(arrived):
            one = torch.ones_like(which, dtype=weight.dtype).unsqueeze(1)
            done = inner(arrived, which.unsqueeze(1), one)
        else:  # the gradients of all parameters are computed on all ranks
            nothing = sum(item.to_local().flatten()[:0].sum() for item in experts.parameters())
            done = arrived + nothing
        back = exchange(done, here, there, group)
        weighted = back * weight.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, source, weighted.to(tokens.dtype))

    experts.forward = forward
