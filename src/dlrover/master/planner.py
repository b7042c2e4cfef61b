"""The next size of a job, from what was measured of it: here of all-reduce jobs. Pure.

Needs numpy and scipy (extra ``planning``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dlrover.master.machine.changes import Question, decided, direction, told_change
from dlrover.master.measured import best_known, means
from dlrover.master.planner_servers import decide_servers
from dlrover.master.precedent import Precedent, precedent_of, resized, shape_of
from dlrover.planning.allreduce import RingModel, RingSample, fit_ring
from dlrover.planning.plans import RingSpace, Terms, plan_ring, sample_ring
from dlrover.planning.search import Choice, Prices, worth
from dlrover.spec import brain
from dlrover.spec.plan import Plan
from dlrover.spec.roles import WORKER, Size
from dlrover.spec.speed import ScaleDecision, ScaleKind, SpeedSample

PRICES = Prices(cpu=0.0, memory=0.0, accelerator=1.0)
"""All nodes of a job are alike: its cost is the number of its workers."""


def decide(asked: Question, similar: brain.Similar | None = None) -> ScaleDecision | None:
    """The next size; None if none is worth a change.

    What was measured comes before what is predicted: a measured size that is better is taken, one that is not
    is not tried again. What the job has not measured itself is taken from a ``similar`` one.
    """
    if asked.current.servers:
        return decide_servers(asked)
    return _decide_nodes(asked, similar)


def _decide_nodes(asked: Question, similar: brain.Similar | None) -> ScaleDecision | None:
    """The same for a job whose workers exchange their gradients."""
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
    if not open_sizes:
        return None
    model = fit_ring(
        [*(past.samples if past is not None else ()), *(_ring(sample) for sample in asked.samples)]
    )
    space = RingSpace(
        nodes=open_sizes,
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
        return _between(known, open_sizes, model, current, choice)
    return _told(ScaleKind.MEASURE, trial, current, past)


def _may_pay(trial: Plan, current: SpeedSample, choice: Choice) -> bool:
    """Whether a size can be better than the present one, if its speed is at the top of the interval."""
    effect = trial.effect
    assert effect is not None
    most = worth(effect.high, trial.groups[WORKER].count, choice)
    return most > (1 + choice.gain) * worth(current.throughput, current.nodes, choice)


def _between(
    known: Mapping[Size, float],
    open_sizes: Sequence[int],
    model: RingModel,
    current: SpeedSample,
    choice: Choice,
) -> ScaleDecision | None:
    """The middle between the present size and a far larger one that is worth less.

    A model of smooth times says nothing of a cliff between them: one more switch, say.
    """
    nodes = current.nodes
    larger = min((size.workers for size in known if size.workers > nodes), default=0)
    if larger <= 2 * nodes:
        return None
    if worth(known[Size(larger)], larger, choice) >= worth(known[Size(nodes)], nodes, choice):
        return None
    between = [n for n in open_sizes if nodes < n < larger]
    if not between:
        return None
    found = min(between, key=lambda n: abs(n - math.sqrt(nodes * larger)))
    after = model.predict(resized(current, found))
    reason = (
        f"{nodes} -> {found} nodes: to be measured, because {larger} nodes did not pay, "
        "and the best size may lie between"
    )
    effect = after.effect(before=known[Size(nodes)], cost=current.cost(Size(found)))
    return decided(ScaleKind.MEASURE, Size(found), reason, effect)


def _ring(sample: SpeedSample) -> RingSample:
    return RingSample(shape_of(sample), sample.step_seconds, sample.compute_seconds)


def _told(
    kind: ScaleKind, plan: Plan, current: SpeedSample, past: Precedent | None
) -> ScaleDecision:
    """The plan in terms of nodes alone: how many workers each has stays as it is."""
    size = Size(plan.groups[WORKER].count)
    _, _, why = plan.reason.partition(": ")
    reason = f"{told_change(current.size, size)}: {why}"
    if past is not None:
        reason += f", as the similar job {past.name} lets expect"
    return decided(kind, size, reason, plan.effect)
