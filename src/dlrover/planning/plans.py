"""The next size of one job, near the measured ones, with its reason and its predicted effect.

Needs numpy and scipy (extra ``planning``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlrover.planning.allreduce import RingModel, RingShape
from dlrover.planning.parameter_server import ServerModel, ServerShape
from dlrover.planning.search import Choice, Prices, best, candidates, worth
from dlrover.planning.throughput import Prediction, Shape, TrustRegion, next_sample
from dlrover.spec.plan import Group, Plan

UNSURE = 0.1
"""Relative standard deviation of a prediction above which a size is worth measuring."""
SLOWER = 0.1
"""Share of its throughput that a job may lose while a size is measured."""


@dataclass(frozen=True)
class Terms:
    """Prices, preferences and limits of a plan."""

    prices: Prices = field(default_factory=Prices)
    choice: Choice = field(default_factory=Choice)
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
) -> Plan | None:
    """Return the next size of a parameter-server job; None if no size near the measured ones pays."""
    want = terms or Terms()
    rows = _server_rows(model, space, want)
    if not len(rows):
        return None
    w, p, cw, cp = rows.T
    spread = model.spread_of(w, p, cw, cp, current.batch)
    cautious = np.exp(-want.choice.caution * spread)
    throughput = model.throughput_of(w, p, cw, cp, current.batch) * cautious
    cost = _server_cost(space, want, w, p, cw, cp)
    found, here = best(throughput, cost, want.choice), model.predict(current)
    speed, price = float(throughput[found]), float(cost[found])
    present = float(_server_cost(space, want, *current.axes()))
    target = _server_shape(rows[found], current)
    if target == current or not _pays(speed, price, here, present, want.choice):
        return None
    after = model.predict(target)
    reason = f"{_changes(_SERVER_AXES, current, target)}: {_gain(here, after, present, price)}"
    effect = after.effect(before=here.throughput, cost=price)
    return Plan(groups=_server_groups(space, target), reason=reason, effect=effect)


def sample_servers(
    model: ServerModel, space: ServerSpace, current: ServerShape, terms: Terms | None = None
) -> Plan | None:
    """Return the size to measure next, where the model knows least for the cost; None if it knows enough.

    For a linear model this is the greedy D-optimal design, which keeps the columns apart. The job neither
    loses much throughput for it nor exceeds its present cost by more than the factor of the trust region.
    """
    want, here = terms or Terms(), model.predict(current)
    rows = _server_rows(model, space, want)
    w, p, cw, cp = rows.T
    cost = _server_cost(space, want, w, p, cw, cp)
    most = want.region.factor * _server_cost(space, want, *current.axes())
    useful = model.throughput_of(w, p, cw, cp, current.batch) >= (1 - SLOWER) * here.throughput
    unknown = model.spread_of(w, p, cw, cp, current.batch) > UNSURE
    asked = useful & unknown & (cost <= most) & np.any(rows != current.axes(), axis=1)
    rows, cost = rows[asked], cost[asked]
    if not len(rows):
        return None
    prices = {tuple(row): float(price) for row, price in zip(rows, cost, strict=True)}
    shapes = [_server_shape(row, current) for row in prices]
    weight = want.choice.weight
    target = next_sample(model.predict, shapes, cost=lambda s: prices[s.axes()] ** weight)
    effect = model.predict(target).effect(before=here.throughput, cost=prices[target.axes()])
    reason = f"{_changes(_SERVER_AXES, current, target)}: {_LEARN}"
    return Plan(groups=_server_groups(space, target), reason=reason, effect=effect)


_SERVER_AXES = ("workers", "servers", "cores per worker", "cores per server")
_LEARN = "to be measured, because the samples so far leave open what it brings"


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


def _server_shape(values: Sequence[float], current: ServerShape) -> ServerShape:
    w, p, cw, cp = (float(value) for value in values)
    return ServerShape(int(w), int(p), cw, cp, current.batch)


def _server_groups(space: ServerSpace, shape: ServerShape) -> dict[str, Group]:
    memory = -(-space.server_memory // shape.servers)
    return {
        "worker": Group(count=shape.workers, cpu=shape.worker_cpu, memory=space.worker_memory),
        "ps": Group(count=shape.servers, cpu=shape.server_cpu, memory=memory),
    }


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
) -> Plan | None:
    """Return the next size of an all-reduce job, at the space's fixed batch; None if no near size pays."""
    want = terms or Terms()
    shapes = _ring_shapes(model, space, current, want)
    if not shapes:
        return None
    predictions = [model.predict(shape) for shape in shapes]
    cautious = np.array([_cautious(prediction, want.choice) for prediction in predictions])
    costs = np.array([_ring_cost(space, want, shape) for shape in shapes])
    found, here = best(cautious, costs, want.choice), model.predict(current)
    target, after, price = shapes[found], predictions[found], float(costs[found])
    present = _ring_cost(space, want, current)
    if target == current or not _pays(cautious[found], price, here, present, want.choice):
        return None
    reason = f"{_changes(_RING_AXES, current, target)}: {_gain(here, after, present, price)}"
    effect = after.effect(before=here.throughput, cost=price)
    return Plan(groups=_ring_groups(space, target), reason=reason, effect=effect)


def sample_ring(
    model: RingModel, space: RingSpace, current: RingShape, terms: Terms | None = None
) -> Plan | None:
    """Return the size to measure next, where the model knows least for the cost; None if it knows enough."""
    want, here = terms or Terms(), model.predict(current)
    most = want.region.factor * _ring_cost(space, want, current)
    near = _ring_shapes(model, space, current, want)
    found = {shape: model.predict(shape) for shape in near if shape != current}
    shapes = [
        shape
        for shape, prediction in found.items()
        if prediction.spread > UNSURE
        and prediction.throughput >= (1 - SLOWER) * here.throughput
        and _ring_cost(space, want, shape) <= most
    ]
    if not shapes:
        return None
    target = next_sample(
        found.__getitem__,
        shapes,
        cost=lambda s: _ring_cost(space, want, s) ** want.choice.weight,
    )
    cost = _ring_cost(space, want, target)
    effect = found[target].effect(before=here.throughput, cost=cost)
    reason = f"{_changes(_RING_AXES, current, target)}: {_LEARN}"
    return Plan(groups=_ring_groups(space, target), reason=reason, effect=effect)


_RING_AXES = ("nodes", "replicas", "samples per replica")


def _ring_cost(space: RingSpace, terms: Terms, shape: RingShape) -> float:
    prices = terms.prices
    return prices.accelerator * shape.replicas + prices.cpu * space.cpu * shape.nodes


def _ring_groups(space: RingSpace, shape: RingShape) -> dict[str, Group]:
    each = -(-shape.replicas // shape.nodes)
    return {"worker": Group(count=shape.nodes, cpu=space.cpu, accelerators=each)}


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
    axes: Sequence[Sequence[float]], measured: Sequence[Shape], region: TrustRegion
) -> list[list[float]]:
    """Return the values of each axis that are near a measured one: the others need not be tried."""
    known = [sorted({shape.axes()[axis] for shape in measured}) for axis in range(len(axes))]
    return [
        sorted(value for value in axis if any(region.near((value,), (other,)) for other in others))
        for axis, others in zip(axes, known, strict=True)
    ]


def _near(rows: Any, measured: Sequence[Shape], region: TrustRegion) -> Any:
    """Apply `TrustRegion.contains` to many sizes at once."""
    inside = np.zeros(len(rows), dtype=bool)
    for other in {tuple(shape.axes()) for shape in measured}:
        limits = np.asarray(other, dtype=float)
        low = np.minimum(limits / region.factor, limits - 1) - 1e-9
        high = np.maximum(limits * region.factor, limits + 1) + 1e-9
        inside |= np.all((rows >= low) & (rows <= high), axis=1)
    return inside


def _cautious(prediction: Prediction, choice: Choice) -> float:
    return prediction.throughput * math.exp(-choice.caution * prediction.spread)


def _pays(speed: float, price: float, here: Prediction, present: float, choice: Choice) -> bool:
    now = worth(_cautious(here, choice), present, choice)
    return bool(worth(speed, price, choice) > (1 + choice.gain) * now)


def _changes(names: Sequence[str], current: Shape, target: Shape) -> str:
    return ", ".join(
        f"{old:g} -> {new:g} {name}"
        for name, old, new in zip(names, current.axes(), target.axes(), strict=True)
        if old != new
    )


def _gain(before: Prediction, after: Prediction, old: float, new: float) -> str:
    faster, dearer = after.throughput / before.throughput - 1, new / old - 1
    return f"{faster:+.0%} throughput for {dearer:+.0%} cost"
