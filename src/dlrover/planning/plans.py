"""The next size of one job, near the measured ones, with its reason and its predicted effect.

Needs numpy and scipy (extra ``planning``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dlrover.planning.allreduce import RingModel, RingShape
from dlrover.planning.parameter_server import ServerModel, ServerShape
from dlrover.planning.search import Preferences, Prices, best, candidates, worth
from dlrover.planning.throughput import CandidateShape, SpeedPrediction, TrustRegion
from dlrover.spec.node import SERVER, WORKER
from dlrover.spec.plan import NodeGroup, ResourcePlan

UNSURE = 0.1
"""Relative standard deviation of a prediction above which a size is worth measuring."""
SLOWER = 0.1
"""Share of its throughput that a job may lose while a size is measured."""


@dataclass(frozen=True)
class Terms:
    """Prices, preferences and limits of a plan."""

    prices: Prices = field(default_factory=Prices)
    choice: Preferences = field(default_factory=Preferences)
    region: TrustRegion = field(default_factory=TrustRegion)
    """Limit of the distance from what was measured."""


@dataclass(frozen=True)
class ServerSpace:
    """The sizes that a parameter-server job may have. An axis that the user has fixed has one value."""

    workers: Sequence[int]
    servers: Sequence[int]
    worker_cpu: Sequence[float]
    server_cpu: Sequence[float]
    worker_memory: int = 0
    """Bytes of each worker."""
    server_memory: int = 0
    """Bytes of all servers together."""
    closed: Collection[tuple[int, int]] = ()
    """Excluded pairs of numbers of workers and servers."""


def plan_servers(
    model: ServerModel, space: ServerSpace, current: ServerShape, terms: Terms | None = None
) -> ResourcePlan | None:
    """Return the next size of a parameter-server job; None if no size near the measured ones pays."""
    return _of_servers(model, space, current, terms or Terms(), learn=False)


def sample_servers(
    model: ServerModel, space: ServerSpace, current: ServerShape, terms: Terms | None = None
) -> ResourcePlan | None:
    """Return the size to measure next, where the model knows least for the cost; None if it knows enough.

    For a linear model this is the greedy D-optimal design, which keeps the columns apart: predictions are most
    uncertain where no sample distinguishes a column from the others. The job neither loses much throughput for it
    nor exceeds its present cost by more than the factor of the trust region.
    """
    return _of_servers(model, space, current, terms or Terms(), learn=True)


def _of_servers(
    model: ServerModel, space: ServerSpace, current: ServerShape, terms: Terms, *, learn: bool
) -> ResourcePlan | None:
    rows = _server_rows(model, space, terms)
    sizes = (*rows.T, current.batch)
    rated = _Rated(
        model.throughput_of(*sizes),
        model.spread_of(*sizes),
        _server_cost(space, terms, *rows.T),
        np.any(rows != current.axes(), axis=1),
        model.predict(current),
        float(_server_cost(space, terms, *current.axes())),
    )
    found = _chosen(rated, terms, learn=learn)
    if found is None:
        return None
    w, p, cw, cp = (float(value) for value in rows[found])
    target = ServerShape(int(w), int(p), cw, cp, current.batch)
    groups = {
        WORKER: NodeGroup(count=target.workers, cpu=cw, memory=space.worker_memory),
        SERVER: NodeGroup(
            count=target.servers, cpu=cp, memory=-(-space.server_memory // target.servers)
        ),
    }
    change = _changes(current, target)
    return _plan(rated, found, model.predict(target), change, groups, learn=learn)


def _server_rows(model: ServerModel, space: ServerSpace, terms: Terms) -> Any:
    """Return the sizes near the measured ones."""
    measured = [sample.shape for sample in model.samples]
    axes = _reachable(
        (space.workers, space.servers, space.worker_cpu, space.server_cpu), measured, terms.region
    )
    if not all(axes):
        return np.empty((0, len(axes)))
    rows = candidates(axes)
    rows = rows[_near(rows, measured, terms.region)]
    return rows[[(row[0], row[1]) not in space.closed for row in rows]] if space.closed else rows


def _server_cost(space: ServerSpace, terms: Terms, w: Any, p: Any, cw: Any, cp: Any) -> Any:
    memory = (w * space.worker_memory + space.server_memory) / (1 << 30)
    return terms.prices.cpu * (w * cw + p * cp) + terms.prices.memory * memory


@dataclass(frozen=True)
class RingSpace:
    """The sizes that an all-reduce job may have."""

    nodes: Sequence[int]
    per_node: int
    """Replicas of a full node, each with one accelerator. A job on one node may have fewer."""
    replicas: Sequence[int] = ()
    """Numbers of replicas; by default all that fill the nodes."""
    cpu: float = 0.0
    """Cores of each node."""
    total_batch: int = 0
    """Samples of a step of all replicas, if fixed; 0: each replica's batch is fixed."""


def plan_ring(
    model: RingModel, space: RingSpace, current: RingShape, terms: Terms | None = None
) -> ResourcePlan | None:
    """Return the next size of an all-reduce job, at the space's fixed batch; None if no near size pays."""
    return _of_ring(model, space, current, terms or Terms(), learn=False)


def sample_ring(
    model: RingModel, space: RingSpace, current: RingShape, terms: Terms | None = None
) -> ResourcePlan | None:
    """Return the size to measure next, where the model knows least for the cost; None if it knows enough."""
    return _of_ring(model, space, current, terms or Terms(), learn=True)


def _of_ring(
    model: RingModel, space: RingSpace, current: RingShape, terms: Terms, *, learn: bool
) -> ResourcePlan | None:
    shapes = _ring_shapes(model, space, current, terms)
    predictions = [model.predict(shape) for shape in shapes]
    rated = _Rated(
        np.array([prediction.throughput for prediction in predictions]),
        np.array([prediction.spread for prediction in predictions]),
        np.array([_ring_cost(space, terms, shape) for shape in shapes]),
        np.array([shape != current for shape in shapes], dtype=bool),
        model.predict(current),
        _ring_cost(space, terms, current),
    )
    found = _chosen(rated, terms, learn=learn)
    if found is None:
        return None
    target = shapes[found]
    each = -(-target.replicas // target.nodes)
    groups = {WORKER: NodeGroup(count=target.nodes, cpu=space.cpu, accelerators=each)}
    change = _changes(current, target)
    return _plan(rated, found, predictions[found], change, groups, learn=learn)


def _ring_cost(space: RingSpace, terms: Terms, shape: RingShape) -> float:
    prices = terms.prices
    return prices.accelerator * shape.replicas + prices.cpu * space.cpu * shape.nodes


def _ring_shapes(
    model: RingModel, space: RingSpace, current: RingShape, terms: Terms
) -> list[RingShape]:
    """Return the sizes of the space that are near the measured ones."""
    counts = space.replicas or [nodes * space.per_node for nodes in space.nodes]
    measured = [sample.shape for sample in model.samples]
    shapes = []
    for count in counts:
        nodes = -(-count // space.per_node)
        batch = current.batch
        if space.total_batch:
            batch = max(1, round(space.total_batch / (count * current.passes)))
        shape = RingShape(nodes, count, batch, current.passes)
        if nodes in space.nodes and count % nodes == 0 and terms.region.contains(shape, measured):
            shapes.append(shape)
    return shapes


def _reachable(
    axes: Sequence[Sequence[float]], measured: Sequence[CandidateShape], region: TrustRegion
) -> list[list[float]]:
    """Return the values of each axis that are near a measured one: the others need not be tried."""
    known = [sorted({shape.axes()[axis] for shape in measured}) for axis in range(len(axes))]
    return [
        sorted(value for value in axis if any(region.near((value,), (other,)) for other in others))
        for axis, others in zip(axes, known, strict=True)
    ]


def _near(rows: Any, measured: Sequence[CandidateShape], region: TrustRegion) -> Any:
    """Apply `TrustRegion.contains` to many sizes at once."""
    inside = np.zeros(len(rows), dtype=bool)
    for other in {tuple(shape.axes()) for shape in measured}:
        limits = np.asarray(other, dtype=float)
        low = np.minimum(limits / region.factor, limits - 1) - 1e-9
        high = np.maximum(limits * region.factor, limits + 1) + 1e-9
        inside |= np.all((rows >= low) & (rows <= high), axis=1)
    return inside


class _Rated(NamedTuple):
    """Sizes with what the model predicts of them, as arrays, beside the present size."""

    speed: Any
    spread: Any
    cost: Any
    other: Any
    """True for sizes that differ from the present one."""
    here: SpeedPrediction
    present: float
    """Cost of the present size."""


def _chosen(rated: _Rated, terms: Terms, *, learn: bool) -> int | None:
    """Return the index of the size that pays most, or that teaches the model most for its cost."""
    if not np.any(rated.other):
        return None
    choice, here = terms.choice, rated.here
    if learn:
        useful = rated.speed >= (1 - SLOWER) * here.throughput
        affordable = rated.cost <= terms.region.factor * rated.present
        wanted = rated.other & useful & affordable & (rated.spread > UNSURE)
        if not np.any(wanted):
            return None
        return int(np.argmax(np.where(wanted, rated.spread / rated.cost**choice.weight, 0.0)))
    cautious = rated.speed * np.exp(-choice.caution * rated.spread)
    found = best(cautious, rated.cost, choice)
    now = worth(here.throughput * math.exp(-choice.caution * here.spread), rated.present, choice)
    pays = worth(cautious[found], rated.cost[found], choice) > (1 + choice.gain) * now
    return found if pays and rated.other[found] else None


def _plan(
    rated: _Rated,
    found: int,
    after: SpeedPrediction,
    change: str,
    groups: dict[str, NodeGroup],
    *,
    learn: bool,
) -> ResourcePlan:
    before, cost = rated.here.throughput, float(rated.cost[found])
    why = "to be measured, because the samples so far do not show what it gains"
    if not learn:
        faster, dearer = after.throughput / before - 1, cost / rated.present - 1
        why = f"{faster:+.0%} throughput for {dearer:+.0%} cost"
    effect = after.effect(before=before, cost=cost)
    return ResourcePlan(groups=groups, reason=f"{change}: {why}", effect=effect)


def _changes(current: CandidateShape, target: CandidateShape) -> str:
    return ", ".join(
        f"{old:g} -> {new:g} {name}"
        for name, old, new in zip(current.NAMES, current.axes(), target.axes(), strict=True)
        if old != new
    )
