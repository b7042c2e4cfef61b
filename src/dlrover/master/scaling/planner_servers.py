"""Planner of the next numbers of workers and servers of a parameter-server job, from its measurements. Pure.

Needs numpy and scipy (extra ``planning``).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from dlrover.master.machine.scaling.changes import Question, decided, direction, told_change
from dlrover.master.scaling.measured import best_known, means, to_measure
from dlrover.planning.neighbours import beside, neighbours, possible, within_reach
from dlrover.planning.parameter_server import (
    Form,
    ServerModel,
    ServerSample,
    ServerShape,
    fit_servers,
)
from dlrover.planning.plans import ServerSpace, Terms, plan_servers, sample_servers
from dlrover.planning.search import Choice, Prices, worth
from dlrover.planning.throughput import Prediction
from dlrover.spec.plan import Plan
from dlrover.spec.roles import SERVER, WORKER, Size
from dlrover.spec.speed import ScaleDecision, ScaleKind, SpeedSample

PRICES = Prices(cpu=1.0, memory=0.0, accelerator=0.0)
"""Prices that count only the cores of the nodes; each node has one if they are unknown."""

FORMS: tuple[Form, ...] = ("dlrover-rm", "queue", "optimus-async")
"""Forms of the models. The first has no term that grows with the workers however many servers there are."""
DESCRIBES = 0.1
"""Maximum relative noise of a model that describes the measurements."""


def decide_servers(asked: Question) -> ScaleDecision | None:
    """Return the next size; None if none is worth a change.

    Measurements take precedence over predictions: a better measured size is taken, a worse one is not tried
    again.
    """
    choice = Choice(weight=asked.cost)
    known = means(asked.samples)
    better = best_known(known, asked, choice)
    if better is not None:
        return better
    first, *others = _fitted(asked)
    plan = _predicted(first, asked, known, choice)
    if plan is not None and _may_pay(plan, asked, choice, at_least=True):
        return plan
    if not asked.explore:
        return None
    trials = [plan, *(_predicted(model, asked, known, choice) for model in others)]
    trials += [_sampled(model, asked, known, choice) for model in (first, *others)]
    trial = next((trial for trial in trials if trial is not None), None)
    if trial is None:
        return _neighbour(first, asked, known, choice)
    return msgspec.structs.replace(trial, kind=ScaleKind.MEASURE)


def _fitted(asked: Question) -> list[ServerModel]:
    """Return the models that describe the measurements, the best one first."""
    samples = [_sample(sample, asked.current) for sample in asked.samples]
    models = sorted((fit_servers(samples, form) for form in FORMS), key=lambda model: model.noise)
    return [model for model in models if model.noise <= max(models[0].noise, DESCRIBES)]


def _predicted(
    model: ServerModel, asked: Question, known: dict[Size, float], choice: Choice
) -> ScaleDecision | None:
    """Return the best size near the measured ones, if it pays."""
    terms = Terms(prices=PRICES, choice=choice, region=asked.region)
    plan = plan_servers(model, _space(asked, known), _shape(asked.current, asked.current), terms)
    return None if plan is None else _decision(plan, asked)


def _sampled(
    model: ServerModel, asked: Question, known: dict[Size, float], choice: Choice
) -> ScaleDecision | None:
    """Return the size about which the model knows least, if it may pay."""
    terms = Terms(prices=PRICES, choice=choice, region=asked.region)
    trial = sample_servers(model, _space(asked, known), _shape(asked.current, asked.current), terms)
    found = None if trial is None else _decision(trial, asked)
    return found if found is not None and _may_pay(found, asked, choice) else None


def _neighbour(
    model: ServerModel, asked: Question, known: dict[Size, float], choice: Choice
) -> ScaleDecision | None:
    """Return a size next to the present, best measured one that nothing rules out."""
    current, here = asked.current, asked.current.size

    def value(throughput: float, size: Size) -> float:
        return worth(throughput, current.cost(size), choice)

    def predicted(size: Size) -> Prediction:
        shape, each = _shape(current, current), _per_node(current)
        return model.predict(replace(shape, workers=size.workers * each, servers=size.servers))

    sizes = [size for size in beside(here, asked.sizes, asked.servers) if size not in known]
    least = (1 + choice.gain) * value(known[here], here)
    near = within_reach(known.keys(), possible(sizes, known, value, least))
    found = neighbours(here, known.keys(), near)
    if not found:
        return None
    target = max(found, key=lambda size: value(predicted(size).high, size))
    return to_measure(current, target, known[here], predicted(target))


def _space(asked: Question, known: dict[Size, float]) -> ServerSpace:
    """Return the sizes to choose from; each node keeps its present cores."""
    here, each = _shape(asked.current, asked.current), _per_node(asked.current)
    return ServerSpace(
        workers=[nodes * each for nodes in asked.sizes],
        servers=list(asked.servers),
        worker_cpu=[here.worker_cpu],
        server_cpu=[here.server_cpu],
        closed=frozenset((size.workers * each, size.servers) for size in known),
    )


def _sample(sample: SpeedSample, current: SpeedSample) -> ServerSample:
    return ServerSample(_shape(sample, current), sample.throughput)


def _shape(sample: SpeedSample, current: SpeedSample) -> ServerShape:
    """Return a measured size in the model's terms, with a worker's batch as the unit of work.

    The cores are those of ``current``: measurements with others have been dropped.
    """
    each = _per_node(sample)
    known = current.worker_cpu > 0 and current.server_cpu > 0
    return ServerShape(
        workers=sample.replicas,
        servers=sample.servers,
        worker_cpu=current.worker_cpu / each if known else 1.0 / each,
        server_cpu=current.server_cpu if known else 1.0,
    )


def _per_node(sample: SpeedSample) -> int:
    return max(1, sample.replicas // sample.nodes)


def _decision(plan: Plan, asked: Question) -> ScaleDecision:
    """Return a plan in terms of nodes."""
    workers = plan.groups[WORKER].count // _per_node(asked.current)
    size = Size(workers, plan.groups[SERVER].count)
    _, _, why = plan.reason.partition(": ")
    reason = f"{told_change(asked.current.size, size)}: {why}"
    return decided(direction(asked.current.size, size), size, reason, plan.effect)


def _may_pay(
    trial: ScaleDecision, asked: Question, choice: Choice, *, at_least: bool = False
) -> bool:
    """Return whether a size beats the present one at its interval's top (with ``at_least``: its bottom)."""
    current, effect = asked.current, trial.plan.effect
    assert effect is not None
    after = worth(effect.low if at_least else effect.high, current.cost(trial.size), choice)
    now = worth(current.throughput, current.cost(current.size), choice)
    return after > (1 if at_least else 1 + choice.gain) * now
