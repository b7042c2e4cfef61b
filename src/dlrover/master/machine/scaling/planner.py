"""Planner of a job's next size from its measurements.

Measurements take precedence over predictions: a better measured size is taken, a worse one is not tried again.
Needs numpy and scipy (extra ``planning``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import msgspec
import numpy as np

from dlrover.master.machine.scaling.changes import Question, decided, direction
from dlrover.planning.allreduce import RingModel, RingSample, RingShape, fit_ring
from dlrover.planning.measured import Measured, Proposal, means, nearest
from dlrover.planning.parameter_server import (
    Form,
    ServerModel,
    ServerSample,
    ServerShape,
    fit_servers,
)
from dlrover.planning.plans import (
    RingSpace,
    ServerSpace,
    Terms,
    plan_ring,
    plan_servers,
    sample_ring,
    sample_servers,
)
from dlrover.planning.search import Preferences, Prices
from dlrover.planning.shapes import latest_of_each, ring_shape
from dlrover.planning.throughput import SpeedPrediction
from dlrover.spec import brain
from dlrover.spec.measurements import SpeedSample
from dlrover.spec.node import SERVER, WORKER, Size
from dlrover.spec.plan import ResourcePlan, ScaleDecision, ScaleKind

BY_WORKERS = Prices(cpu=0.0, memory=0.0, accelerator=1.0)
"""Prices by which a job costs its number of workers, as all nodes of a job are alike."""
BY_CORES = Prices(cpu=1.0, memory=0.0, accelerator=0.0)
"""Prices that count only the cores of the nodes; each node has one if they are unknown."""
FORMS: tuple[Form, ...] = ("dlrover-rm", "queue", "optimus-async")
"""Forms of the models of a job with servers. The first has no term that grows with the workers however many
servers there are."""
DESCRIBES = 0.1
"""Maximum relative error, or noise, of a model that describes the measurements."""
SHORTEST_STEP, LONGEST_STEP = 1e-9, 1e9
"""Limits of a step of a similar job in seconds; others are no measurements."""
ALIKE = 1.25
"""Maximum factor between the step times of a job and those of a similar one."""


def decide(question: Question, similar: brain.Similar | None = None) -> ScaleDecision | None:
    """Return the next size; None if none is worth a change.

    What the job has not measured itself is taken from a ``similar`` one, unless the job has servers.
    """
    if question.current.servers:
        return _decide_servers(question)
    return _decide_nodes(question, similar)


def _measured(question: Question, past: Mapping[Size, float]) -> Measured:
    """Return the sizes that the job has measured, completed by those of a similar one."""
    own = means((sample.size, sample.throughput) for sample in question.samples)
    current = question.current
    return Measured(current.size, {**past, **own}, current.cost, Preferences(weight=question.cost))


def _better(question: Question, measured: Measured) -> Proposal | None:
    return measured.better(
        lambda size: size.workers in question.sizes and size.servers in question.servers
    )


def _decision(found: Proposal, question: Question) -> ScaleDecision:
    return decided(
        direction(question.current.size, found.size), found.size, found.reason, found.effect
    )


def _to_measure(found: Proposal | None) -> ScaleDecision | None:
    return None if found is None else decided(ScaleKind.MEASURE, *found)


def _in_nodes(plan: ResourcePlan, current: SpeedSample) -> ScaleDecision:
    """Return a plan in terms of nodes alone: the workers per node stay as they are."""
    workers, servers = plan.groups[WORKER].count, plan.groups.get(SERVER)
    size = Size(workers) if servers is None else Size(workers // _per_node(current), servers.count)
    _, _, why = plan.reason.partition(": ")
    reason = f"{current.size.change_to(size)}: {why}"
    return decided(direction(current.size, size), size, reason, plan.effect)


def _may_pay(
    trial: ScaleDecision, current: SpeedSample, measured: Measured, *, at_least: bool = False
) -> bool:
    """Return whether a size beats the present one at its interval's top (with ``at_least``: its bottom)."""
    effect = trial.plan.effect
    assert effect is not None
    after = measured.worth(effect.low if at_least else effect.high, trial.size)
    now = measured.worth(current.throughput, current.size)
    return after > (1 if at_least else 1 + measured.choice.gain) * now


def _per_node(sample: SpeedSample) -> int:
    return max(1, sample.replicas // sample.nodes)


# ---- jobs whose workers exchange their gradients


def _decide_nodes(question: Question, similar: brain.Similar | None) -> ScaleDecision | None:
    current, past = question.current, precedent_of(similar, question.samples, question.sizes)
    measured = _measured(question, past.throughput if past is not None else {})
    known = measured.known
    better = _better(question, measured)
    if better is not None:
        own = past is None or any(better.size == sample.size for sample in question.samples)
        return _of_precedent(
            _decision(better, question), " by the similar job {}", None if own else past
        )
    open_sizes = [nodes for nodes in question.sizes if Size(nodes) not in known]
    searched = past is not None and len(past.throughput) > 1
    if not open_sizes or searched:
        return None
    samples = [RingSample(shape_of(s), s.step_seconds, s.compute_seconds) for s in question.samples]
    model = fit_ring([*(past.samples if past is not None else ()), *samples])
    space = RingSpace(
        nodes=_described(model, open_sizes, known, current),
        per_node=current.replicas // current.nodes,
        total_batch=current.total_batch,
    )
    terms = Terms(prices=BY_WORKERS, choice=measured.choice, region=question.region)
    plan = plan_ring(model, space, shape_of(current), terms)
    if plan is not None:
        return _of_precedent(_in_nodes(plan, current), ", as the similar job {} lets expect", past)
    if not question.explore:
        return None
    plan = sample_ring(model, space, shape_of(current), terms)
    trial = None if plan is None else _in_nodes(plan, current)
    if trial is not None and _may_pay(trial, current, measured):
        trial = msgspec.structs.replace(trial, kind=ScaleKind.MEASURE)
        return _of_precedent(trial, ", as the similar job {} lets expect", past)
    alone = None
    if current.compute_seconds:
        alone = current.throughput * current.step_seconds / current.compute_seconds / current.nodes

    def predict(size: Size) -> SpeedPrediction:
        return model.predict(resized(current, size.workers))

    return _to_measure(measured.neighbour(question.sizes, (), predict, alone=alone))


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


def shape_of(sample: SpeedSample) -> RingShape:
    """Return the size that was measured, with all passes of a step as one."""
    return resized(sample, sample.nodes)


def resized(sample: SpeedSample, nodes: int) -> RingShape:
    """Return the size of a job with another number of the same nodes."""
    replicas = sample.replicas // sample.nodes * nodes
    batch = max(1, round(sample.total_batch / replicas)) if sample.total_batch else 1
    return RingShape(nodes, replicas, batch)


# ---- measurements of a similar job


@dataclass(frozen=True)
class Precedent:
    """A similar job, whose measurements a job may use as its own."""

    name: str
    samples: Sequence[RingSample]
    """Its measurements, scaled to the speed of the job itself."""
    throughput: Mapping[Size, float]
    """Throughput of the job's sizes that it has measured."""


def precedent_of(
    similar: brain.Similar | None, own: Sequence[SpeedSample], sizes: Sequence[int]
) -> Precedent | None:
    """Return the precedent of a job with some samples; None if there is none or the samples contradict it.

    The Brain may know jobs of others, whose masters report what they like.
    """
    if similar is None or not similar.samples:
        return None
    found = [_whole_step(sample) for sample in latest_of_each(similar.samples)]
    if not all(map(_is_plausible, found)):
        return None
    slower = [sample.step_seconds / seconds for sample, seconds in _expected(found, own)]
    if not all(1 / ALIKE <= ratio <= ALIKE for ratio in slower):
        return None
    scaled = [_scaled(sample, mean(slower)) for sample in found]
    shapes = {nodes: resized(own[-1], nodes) for nodes in sizes}
    steps = {nodes: _mean_step(scaled, shape) for nodes, shape in shapes.items()}
    throughput = {
        Size(nodes): shapes[nodes].replicas * shapes[nodes].batch / seconds
        for nodes, seconds in steps.items()
        if seconds
    }
    return Precedent(similar.name, scaled, throughput)


def _of_precedent(decision: ScaleDecision, hint: str, past: Precedent | None) -> ScaleDecision:
    """Return a decision whose reason names the similar job, if there is one."""
    if past is None:
        return decision
    plan = msgspec.structs.replace(
        decision.plan, reason=decision.plan.reason + hint.format(past.name)
    )
    return msgspec.structs.replace(decision, plan=plan)


def _whole_step(sample: brain.Sample) -> RingSample:
    """Return a step of all passes as one pass, which is how a job sees its own steps."""
    shape, passes = ring_shape(sample.shape), sample.shape.passes
    total, compute = shape.replicas * shape.batch * passes, sample.compute_seconds
    return RingSample(
        RingShape(shape.nodes, shape.replicas, shape.batch * passes),
        total / sample.throughput,
        None if compute is None else compute * passes,
    )


def _is_plausible(sample: RingSample) -> bool:
    times = (sample.step_seconds, sample.compute_seconds or sample.step_seconds)
    return all(SHORTEST_STEP < seconds < LONGEST_STEP for seconds in times)


def _expected(
    found: Sequence[RingSample], own: Sequence[SpeedSample]
) -> list[tuple[SpeedSample, float]]:
    """Return each sample with the seconds of a similar job's step: measured, or by its model."""
    model = fit_ring(found)
    expected = []
    for sample in own:
        shape = shape_of(sample)
        predicted = float(model.step_time(shape.nodes, shape.replicas, shape.batch))
        expected.append((sample, _mean_step(found, shape) or predicted))
    return expected


def _mean_step(samples: Sequence[RingSample], shape: RingShape) -> float:
    """Return the mean seconds of a step of a size; 0 if it was not measured."""
    steps = [sample.step_seconds for sample in samples if sample.shape == shape]
    return mean(steps) if steps else 0.0


def _scaled(sample: RingSample, factor: float) -> RingSample:
    compute = sample.compute_seconds
    return replace(
        sample,
        step_seconds=sample.step_seconds * factor,
        compute_seconds=None if compute is None else compute * factor,
    )


# ---- jobs with parameter servers


def _decide_servers(question: Question) -> ScaleDecision | None:
    current, measured = question.current, _measured(question, {})
    better = _better(question, measured)
    if better is not None:
        return _decision(better, question)
    models, here, each = _fitted(question), _server_shape(current, current), _per_node(current)
    terms = Terms(prices=BY_CORES, choice=measured.choice, region=question.region)
    space = ServerSpace(
        workers=[nodes * each for nodes in question.sizes],
        servers=list(question.servers),
        worker_cpu=[here.worker_cpu],  # each node keeps its present cores
        server_cpu=[here.server_cpu],
        closed=frozenset((size.workers * each, size.servers) for size in measured.known),
    )

    def predicted(model: ServerModel) -> ScaleDecision | None:
        plan = plan_servers(model, space, here, terms)
        return None if plan is None else _in_nodes(plan, current)

    def sampled(model: ServerModel) -> ScaleDecision | None:
        plan = sample_servers(model, space, here, terms)
        trial = None if plan is None else _in_nodes(plan, current)
        return trial if trial is not None and _may_pay(trial, current, measured) else None

    def predict(size: Size) -> SpeedPrediction:
        shape = replace(here, workers=size.workers * each, servers=size.servers)
        return models[0].predict(shape)

    plan = predicted(models[0])
    if plan is not None and _may_pay(plan, current, measured, at_least=True):
        return plan
    if not question.explore:
        return None
    trials = [plan, *(predicted(model) for model in models[1:])]
    trials += [sampled(model) for model in models]
    for trial in trials:
        if trial is not None:
            return msgspec.structs.replace(trial, kind=ScaleKind.MEASURE)
    return _to_measure(measured.neighbour(question.sizes, question.servers, predict))


def _fitted(question: Question) -> list[ServerModel]:
    """Return the models that describe the measurements, the best one first."""
    samples = [
        ServerSample(_server_shape(s, question.current), s.throughput) for s in question.samples
    ]
    models = sorted((fit_servers(samples, form) for form in FORMS), key=lambda model: model.noise)
    return [model for model in models if model.noise <= max(models[0].noise, DESCRIBES)]


def _server_shape(sample: SpeedSample, current: SpeedSample) -> ServerShape:
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
