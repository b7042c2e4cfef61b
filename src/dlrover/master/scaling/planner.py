"""Planner of a job's next size from its measurements; here for all-reduce jobs. Pure.

Needs numpy and scipy (extra ``planning``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dlrover.master.machine.scaling.changes import Question, decided, direction, told_change
from dlrover.master.scaling.measured import best_known, means, to_measure
from dlrover.master.scaling.planner_servers import decide_servers
from dlrover.master.scaling.precedent import Precedent, precedent_of, resized, shape_of
from dlrover.planning.allreduce import RingModel, RingSample, fit_ring
from dlrover.planning.neighbours import nearest, neighbours, possible, within_reach
from dlrover.planning.plans import RingSpace, Terms, plan_ring, sample_ring
from dlrover.planning.search import Choice, Prices, worth
from dlrover.spec import brain
from dlrover.spec.plan import Plan
from dlrover.spec.roles import WORKER, Size
from dlrover.spec.speed import ScaleDecision, ScaleKind, SpeedSample

PRICES = Prices(cpu=0.0, memory=0.0, accelerator=1.0)
"""Prices by which a job costs its number of workers, as all nodes of a job are alike."""

DESCRIBES = 0.1
"""Maximum relative error of a model that describes the measurements."""


def decide(asked: Question, similar: brain.Similar | None = None) -> ScaleDecision | None:
    """Return the next size; None if none is worth a change.

    Measurements take precedence over predictions: a better measured size is taken, a worse one is not tried
    again. What the job has not measured itself is taken from a ``similar`` one.
    """
    if asked.current.servers:
        return decide_servers(asked)
    return _decide_nodes(asked, similar)


def _decide_nodes(asked: Question, similar: brain.Similar | None) -> ScaleDecision | None:
    """Return the next size of a job whose workers exchange their gradients."""
    choice = Choice(weight=asked.cost)
    current = asked.current
    past = precedent_of(similar, asked.samples, asked.sizes)
    known = means(asked.samples)
    better = best_known(known, asked, choice, past)
    if better is not None:
        return better
    if past is not None:
        known = {**past.throughput, **known}
    open_sizes = [nodes for nodes in asked.sizes if Size(nodes) not in known]
    searched = past is not None and len(past.throughput) > 1
    if not open_sizes or searched:
        return None
    model = fit_ring(
        [*(past.samples if past is not None else ()), *(_ring(sample) for sample in asked.samples)]
    )
    space = RingSpace(
        nodes=_described(model, open_sizes, known, current),
        per_node=current.replicas // current.nodes,
        total_batch=current.total_batch,
    )
    terms = Terms(prices=PRICES, choice=choice, region=asked.region)
    here = shape_of(current)
    plan = plan_ring(model, space, here, terms)
    if plan is not None:
        size = Size(plan.groups[WORKER].count)
        return _told(direction(current.size, size), plan, current, past)
    if not asked.explore:
        return None
    trial = sample_ring(model, space, here, terms)
    if trial is None or not _may_pay(trial, current, choice):
        return _neighbour(known, open_sizes, model, current, choice)
    return _told(ScaleKind.MEASURE, trial, current, past)


def _described(
    model: RingModel, open_sizes: Sequence[int], known: Mapping[Size, float], current: SpeedSample
) -> list[int]:
    """Return the sizes whose nearest measured size the model fits; around others it says nothing."""
    shapes = [resized(current, size.workers) for size in known]
    columns = zip(*((shape.nodes, shape.replicas, shape.batch) for shape in shapes), strict=True)
    predicted = model.throughput_of(*(np.array(column) for column in columns))
    errors = abs(predicted / np.array(list(known.values())) - 1)
    fits = {size.workers: error <= DESCRIBES for size, error in zip(known, errors, strict=True)}
    return [nodes for nodes in open_sizes if fits[nearest(nodes, fits)]]


def _may_pay(trial: Plan, current: SpeedSample, choice: Choice) -> bool:
    """Return whether a size can beat the present one if its speed is at the top of the interval."""
    effect = trial.effect
    assert effect is not None
    most = worth(effect.high, trial.groups[WORKER].count, choice)
    return most > (1 + choice.gain) * worth(current.throughput, current.nodes, choice)


def _neighbour(
    known: Mapping[Size, float],
    open_sizes: Sequence[int],
    model: RingModel,
    current: SpeedSample,
    choice: Choice,
) -> ScaleDecision | None:
    """Return a size next to the present, best measured one that nothing rules out."""

    def value(throughput: float, size: Size) -> float:
        return worth(throughput, size.workers, choice)

    nodes, here = current.nodes, current.size
    least = (1 + choice.gain) * value(known[here], here)
    alone = None
    if current.compute_seconds:
        alone = current.throughput * current.step_seconds / current.compute_seconds / nodes
    open_ = possible([Size(n) for n in open_sizes], known, value, least, alone)
    near = within_reach(known.keys(), open_)
    found = neighbours(here, known.keys(), near)

    def top(size: Size) -> float:
        return value(model.predict(resized(current, size.workers)).high, size)

    if near and Size(1) in open_ and top(Size(1)) > least:
        found.append(min(near))
    if not found:
        return None
    target = max(found, key=top)
    return to_measure(current, target, known[here], model.predict(resized(current, target.workers)))


def _ring(sample: SpeedSample) -> RingSample:
    return RingSample(shape_of(sample), sample.step_seconds, sample.compute_seconds)


def _told(
    kind: ScaleKind, plan: Plan, current: SpeedSample, past: Precedent | None
) -> ScaleDecision:
    """Return a plan in terms of nodes alone: the workers per node stay as they are."""
    size = Size(plan.groups[WORKER].count)
    _, _, why = plan.reason.partition(": ")
    reason = f"{told_change(current.size, size)}: {why}"
    if past is not None:
        reason += f", as the similar job {past.name} lets expect"
    return decided(kind, size, reason, plan.effect)
