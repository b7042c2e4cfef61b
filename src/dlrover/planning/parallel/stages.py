"""How many layers each pipeline stage has."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from dlrover.planning.parallel.records import Transformer

WORTHWHILE = 0.05
"""Part of the slowest stage's time that unequal stages must save where equal ones are possible."""


@dataclass(frozen=True)
class Stages:
    """Layers of the pipeline ranks."""

    chunks: tuple[int, ...]
    """Layers of each part that has some, in the order of the model; part ``i`` is on rank ``i % pp``."""
    first: int
    """Layers of the first rank."""
    last: int
    """Layers of the last rank, which has the output layer, too."""
    most: int
    """Layers of the rank with the most."""
    imbalance: float
    """Time of the slowest rank, with the output layer, as a multiple of the average one."""


def head_layers(model: Transformer) -> float:
    """Return the cost of the output layer, in layers."""
    active = model.experts_per_token if model.experts else 1
    layer = model.attention + model.expert * (active + model.shared_experts)
    return model.vocab * model.hidden / layer


@lru_cache(maxsize=4096)
def stages(model: Transformer, pp: int, virtual: int) -> Stages:
    """Return the division of a model's layers over ``pp * virtual`` parts.

    Interleaved parts, and those of a model with experts, whose memory the layers are, are as equal as possible. Otherwise a stage takes layers until its share of the cost, with the
    output layer, is reached, if that is faster than equal stages by more than ``WORTHWHILE``.
    """
    # More ranks and parts than layers have none.
    ranks_in_all, pp = pp, min(pp, model.layers + 1)
    virtual = min(virtual, -(-model.layers // pp))
    parts = pp * virtual
    each, rest = divmod(model.layers, parts)
    if virtual > 1 or parts == 1 or parts >= model.layers or model.experts:
        chunks = tuple(each + (part < rest) for part in range(parts))
    else:
        chunks = _balanced(model, pp)
        if rest == 0:
            head = head_layers(model)
            slowest = max(*chunks[:-1], chunks[-1] + head)
            if each + head <= slowest * (1 + WORTHWHILE):
                chunks = (each,) * pp
    ranks = [sum(chunks[rank::pp]) for rank in range(pp)]
    head = head_layers(model)
    average = (model.layers + head) / ranks_in_all
    return Stages(chunks, ranks[0], ranks[-1], max(ranks), max(*ranks, ranks[-1] + head) / average)


def _balanced(model: Transformer, pp: int) -> tuple[int, ...]:
    """Stages that end with the layer that reaches their share of the cost; each has one at least but the last."""
    share = (model.layers + head_layers(model)) / pp
    ends = [min(model.layers, math.ceil((stage + 1) * share)) for stage in range(pp - 1)]
    for stage in range(pp - 1):
        floor = stage + 1
        roof = model.layers - (pp - 2 - stage)
        ends[stage] = max(floor, min(roof, ends[stage]))
    bounds = [0, *ends, model.layers]
    return tuple(end - start for start, end in itertools.pairwise(bounds))
