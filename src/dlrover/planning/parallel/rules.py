"""What a strategy must obey, apart from memory: each rule with its sentence. Needs numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrover.planning.parallel.accelerators import accelerator
from dlrover.planning.parallel.columns import Columns
from dlrover.planning.parallel.records import (
    Cluster,
    Strategy,
    Transformer,
    check_whole,
)
from dlrover.planning.parallel.stages import stages


@dataclass(frozen=True)
class PlannedJob:
    """A model, the cluster that trains it, and the batch of a step."""

    model: Transformer
    cluster: Cluster
    sequence: int
    global_batch: int
    precision: str = "bf16"
    """Type of the matrix products of the strategies that are searched."""

    def __post_init__(self) -> None:
        check_whole(1, sequence=self.sequence, global_batch=self.global_batch)
        Strategy(precision=self.precision)


@dataclass(frozen=True)
class StrategyRule:
    """One rule: which strategies break it, and what to say about one that does."""

    broken: Callable[[PlannedJob, Columns], Any]
    sentence: Callable[[PlannedJob, Strategy], str]


IMBALANCE = 2.0
"""Multiple of the average stage's time that the slowest one takes at most."""


def _divides(part: Any, whole: int) -> Any:
    return whole % part == 0


def _imbalance(job: PlannedJob, of: Columns) -> Any:
    pairs, index = np.unique(np.stack([of.pp, of.virtual]), axis=1, return_inverse=True)
    found = [stages(job.model, int(pp), int(virtual)).imbalance for pp, virtual in pairs.T]
    return np.array(found)[index.reshape(-1)] > IMBALANCE


def _experts(job: PlannedJob, of: Columns) -> Any:
    ranks = of.dp * of.cp
    spread = (ranks % of.ep == 0) | ((ranks * of.tp) % of.ep == 0)
    return (of.ep > 1) & ~(spread & (max(job.model.experts, 1) % of.ep == 0))


RULES = (
    StrategyRule(
        lambda job, of: of.fp8 & (not accelerator(job.cluster.accelerator).fp8),
        lambda job, one: f"precision is fp8: {job.cluster.accelerator} has no products in fp8.",
    ),
    StrategyRule(
        lambda job, of: of.size != job.cluster.size,
        lambda job, one: (
            f"dp_replicate x dp_shard x tp x pp x cp is {one.size} ranks: "
            f"the cluster has {job.cluster.size} accelerators."
        ),
    ),
    StrategyRule(
        lambda job, of: ~_divides(of.tp, job.model.heads),
        lambda job, one: f"tp is {one.tp}: it must divide the {job.model.heads} heads.",
    ),
    StrategyRule(
        lambda job, of: ~_divides(of.tp, job.model.kv_heads),
        lambda job, one: (
            f"tp is {one.tp}: it must divide the {job.model.kv_heads} heads of keys and values."
        ),
    ),
    StrategyRule(
        lambda job, of: ~_divides(of.tp, job.model.ffn),
        lambda job, one: f"tp is {one.tp}: it must divide the ffn of {job.model.ffn}.",
    ),
    StrategyRule(
        lambda job, of: of.pp * of.virtual > job.model.layers,
        lambda job, one: (
            f"pp x virtual is {one.pp * one.virtual} parts: the model has {job.model.layers} layers."
        ),
    ),
    StrategyRule(
        _imbalance,
        lambda job, one: (
            f"pp is {one.pp}: the slowest stage takes "
            f"{stages(job.model, one.pp, one.virtual).imbalance:.1f} times the average one, with the output layer."
        ),
    ),
    StrategyRule(
        lambda job, of: (of.virtual > 1) & (of.pp == 1),
        lambda job, one: f"virtual is {one.virtual}: that needs pp of 2 or more.",
    ),
    StrategyRule(
        lambda job, of: ~_divides(of.cp, job.sequence),
        lambda job, one: f"cp is {one.cp}: it must divide the sequence of {job.sequence}.",
    ),
    StrategyRule(
        _experts,
        lambda job, one: (
            f"ep is {one.ep}: it must divide the {job.model.experts} experts, "
            f"and dp x cp ({one.dp * one.cp}) or dp x cp x tp ({one.dp * one.cp * one.tp})."
        ),
    ),
    StrategyRule(
        lambda job, of: ~_divides(of.dp * of.micro_batch, job.global_batch),
        lambda job, one: (
            f"dp x micro_batch is {one.dp * one.micro_batch}: "
            f"it must divide the global batch of {job.global_batch}."
        ),
    ),
    StrategyRule(
        lambda job, of: (of.virtual > 1) & (of.rounds(job.global_batch) % of.pp != 0),
        lambda job, one: (
            f"A rank has {job.global_batch // (one.dp * one.micro_batch)} micro-batches: "
            f"with virtual above 1, pp ({one.pp}) must divide them."
        ),
    ),
)


def obeys(job: PlannedJob, of: Columns) -> Any:
    """Return which strategies break no rule."""
    good = np.ones(len(of), dtype=bool)
    for rule in RULES:
        good &= ~np.asarray(rule.broken(job, of))
    return good


def first_broken(job: PlannedJob, strategy: Strategy) -> str:
    """Return the sentence of the first rule that a strategy breaks, or nothing."""
    one = Columns.of([strategy])
    for rule in RULES:
        if np.asarray(rule.broken(job, one))[0]:
            return rule.sentence(job, strategy)
    return ""
