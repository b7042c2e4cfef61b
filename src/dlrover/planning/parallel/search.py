"""The search of the fastest strategies of a job: all of them are rated. Needs numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dlrover.planning.parallel.columns import Columns
from dlrover.planning.parallel.predict import Predicted, predict_all
from dlrover.planning.parallel.records import (
    PRECISIONS,
    RECOMPUTE,
    Cluster,
    Prediction,
    Strategy,
    Transformer,
    check_whole,
)
from dlrover.planning.parallel.rules import PlannedJob, obeys
from dlrover.planning.parallel.stages import stages

BLOCK = 100_000
"""Strategies that are rated at once: more would not fit a processor's caches."""
MICRO_BATCHES = 32
"""Sequences of a micro-batch, at most."""
TENSOR = 64
"""Ranks that share a matrix, at most."""
CONTEXT_LEAST = 4096
"""Tokens of a sequence that each rank has at least with context parallelism."""
PARTS_MOST = 16
"""Parts of the model on one pipeline rank, at most."""
RELUCTANCE = 1.1
"""Factor by which a strategy must be faster whose optimizer is smaller, or has its state on the host."""
SIMPLER = 1.03
"""Factor by which a strategy must be faster for each further kind of parallelism that it needs."""
FIELDS = ("dp_replicate", "dp_shard", "zero", "tp", "pp", "virtual", "cp", "ep", "micro_batch")


def search(
    model: Transformer,
    cluster: Cluster,
    *,
    sequence: int,
    global_batch: int,
    limit: int = 10,
    precision: str = "bf16",
) -> list[tuple[Strategy, Prediction]]:
    """Return the fastest strategies that fit, each the best one of its degrees of parallelism.

    Args:
        model: The model's shape.
        cluster: The accelerators that run it.
        sequence: Tokens of a sequence.
        global_batch: Sequences of a step, on all ranks together.
        limit: Strategies to return, at most.
        precision: Type of matrix products: ``bf16`` or ``fp8``.

    Raises:
        ConfigurationError: the accelerator or the precision is unknown, or a number is not positive.
    """
    check_whole(1, limit=limit)
    return fitting(PlannedJob(model, cluster, sequence, global_batch, precision))[:limit]


def fitting(job: PlannedJob) -> list[tuple[Strategy, Prediction]]:
    """Return the best strategy of each choice of degrees that fits, the fastest first."""
    best: dict[tuple[int, ...], tuple[float, Strategy, Prediction]] = {}
    for block in _blocks(job):
        for variant in _variants(block.take(obeys(job, block))):
            _keep(best, predict_all(job, variant))
    for one in [found[1] for found in best.values() if found[1].recompute != "none"]:
        _keep(best, predict_all(job, _by_layers(job.model, one)))
    order = sorted(best, key=lambda degrees: (best[degrees][0], degrees))
    return [best[degrees][1:] for degrees in order]


def _by_layers(model: Transformer, one: Strategy) -> Columns:
    """A strategy with each number of layers that can be recomputed.

    The layers are alike, so that only their number matters, and rating all numbers is exact.
    """
    most = stages(model, one.pp, one.virtual).most
    return Columns.of(
        [
            replace(one, recompute=way, recompute_layers=layers)
            for way in RECOMPUTE[1:]
            for layers in range(1, most)
        ]
        or [one]
    )


def _keep(
    best: dict[tuple[int, ...], tuple[float, Strategy, Prediction]], rated: Predicted
) -> None:
    """Keep the fastest strategies that fit, one for each choice of degrees."""
    of = rated.of
    index = np.flatnonzero(rated.fits)
    other = of.offload | (of.optimizer_bytes < 12)
    kinds = sum((getattr(of, name) > 1).astype(int) for name in ("tp", "pp", "cp", "ep"))
    cost = rated.seconds * np.where(other, RELUCTANCE, 1.0) * SIMPLER**kinds
    degrees = np.stack([of.tp, of.pp, of.cp, of.ep], axis=1)
    order = index[np.argsort(cost[index], kind="stable")]
    _, firsts = np.unique(degrees[order], axis=0, return_index=True)
    for at in order[firsts]:
        key = tuple(int(each) for each in degrees[at])
        if key not in best or cost[at] < best[key][0]:
            best[key] = (float(cost[at]), of.strategy(at), rated.one(int(at)))


def _variants(of: Columns) -> Iterator[Columns]:
    """The strategies with each way to keep the optimizer's state."""
    for offload, size in ((False, 12), (False, 6), (True, 12)):
        if len(of):
            full = np.ones(len(of), dtype=int)
            yield Columns(
                **{
                    **vars(of),
                    "offload": full.astype(bool) & offload,
                    "optimizer_bytes": full * size,
                }
            )


def _blocks(job: PlannedJob) -> Iterator[Columns]:
    """All strategies of a job, in blocks; some break a rule."""
    rows = _degrees(job)
    while block := list(itertools.islice(rows, BLOCK // len(RECOMPUTE))):
        yield _columns(np.array(block, dtype=int), PRECISIONS.index(job.precision))


def _columns(rows: Any, precision: int) -> Columns:
    """Strategies from rows of ``FIELDS``, with each way to recompute."""
    rows = np.repeat(rows, len(RECOMPUTE), axis=0)
    count = len(rows)
    no, one = np.zeros(count, dtype=bool), np.ones(count, dtype=int)
    return Columns(
        **dict(zip(FIELDS, rows.T, strict=True)),
        recompute=np.tile(np.arange(len(RECOMPUTE)), count // len(RECOMPUTE)),
        recompute_layers=0 * one,
        sequence_parallel=~no,
        offload=no,
        optimizer_bytes=12 * one,
        gradient_bytes=4 * one,
        chunked_loss=no,
        compile=no,
        precision=precision * one,
    )


def _degrees(job: PlannedJob) -> Iterator[tuple[int, ...]]:
    """Rows of ``FIELDS``: all ways to write the cluster's size as a product of degrees."""
    model, size = job.model, job.cluster.size
    for tp in _divisors(size, model.heads, model.kv_heads, model.ffn):
        if tp > TENSOR:
            continue
        for pp in _divisors(size // tp):
            if pp > model.layers:
                continue
            for cp in _divisors(size // (tp * pp), job.sequence):
                if cp > 1 and job.sequence // cp < CONTEXT_LEAST:
                    continue
                dp = size // (tp * pp * cp)
                if job.global_batch % dp == 0:
                    yield from _rest(job, tp, pp, cp, dp)


def _rest(job: PlannedJob, tp: int, pp: int, cp: int, dp: int) -> Iterator[tuple[int, ...]]:
    """Rows for given degrees."""
    here = job.global_batch // dp
    for micro in (1 << power for power in range(MICRO_BATCHES.bit_length())):
        # a schedule with fewer micro-batches than stages never fills the pipeline
        if here % micro or here // micro < pp:
            continue
        for virtual in _virtual(job.model.layers, pp, here // micro):
            for ep in _expert_degrees(job.model, dp * cp, tp):
                for shard, zero in _sharding(dp, cp, pp):
                    yield dp // shard, shard, zero, tp, pp, virtual, cp, ep, micro


def _virtual(layers: int, pp: int, rounds: int) -> list[int]:
    """Parts of the model that a pipeline rank can hold: equal ones, or equal if both ends count as a layer."""
    if pp == 1 or rounds % pp:
        return [1]
    most = min(PARTS_MOST, layers // pp)
    more = [v for v in range(2, most + 1) if layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0]
    return [1, *more]


def _expert_degrees(model: Transformer, ranks: int, tp: int) -> Sequence[int]:
    if not model.experts:
        return [1]
    return _divisors(ranks * tp, model.experts)


def _sharding(dp: int, cp: int, pp: int) -> list[tuple[int, int]]:
    """Ranks over which states are sharded, and ZeRO's stage.

    No stage 3 in a pipeline: it would gather a stage's parameters twice for every micro-batch.
    """
    rows = [(1, 0)] if cp == 1 else []
    zeros = (1, 2, 3) if pp == 1 else (1, 2)
    return rows + [(shard, zero) for shard in _divisors(dp) if shard * cp > 1 for zero in zeros]


def _divisors(number: int, *others: int) -> Sequence[int]:
    """Divisors that several numbers have in common."""
    common = math.gcd(number, *others)
    small = [part for part in range(1, math.isqrt(common) + 1) if common % part == 0]
    return sorted({*small, *(common // part for part in small)})
