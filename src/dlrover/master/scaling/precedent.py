"""Measurements of a similar job that a job may use as its own. Needs numpy and scipy (extra ``planning``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from dlrover.planning.allreduce import RingSample, RingShape, fit_ring
from dlrover.planning.measured import latest_of_each, ring_shape
from dlrover.spec import brain
from dlrover.spec.roles import Size
from dlrover.spec.speed import SpeedSample

ALIKE = 1.25
"""Maximum factor between the step times of a job and those of a similar one."""


@dataclass(frozen=True)
class Precedent:
    """A similar job."""

    name: str
    samples: Sequence[RingSample]
    """Its measurements, scaled to the speed of the job itself."""
    throughput: Mapping[Size, float]
    """Throughput of the job's sizes that it has measured."""


def precedent_of(
    similar: brain.Similar | None, own: Sequence[SpeedSample], sizes: Sequence[int]
) -> Precedent | None:
    """Return the precedent of a job with some samples; None if there is none or the samples contradict it."""
    if similar is None or not similar.samples:
        return None
    found = [_whole_step(sample) for sample in latest_of_each(similar.samples)]
    slower = [sample.step_seconds / seconds for sample, seconds in _expected(found, own)]
    if not all(1 / ALIKE <= ratio <= ALIKE for ratio in slower):
        return None
    scaled = [_scaled(sample, mean(slower)) for sample in found]
    shapes = {nodes: resized(own[-1], nodes) for nodes in sizes}
    steps = {nodes: _measured(scaled, shape) for nodes, shape in shapes.items()}
    throughput = {
        Size(nodes): shapes[nodes].replicas * shapes[nodes].batch / seconds
        for nodes, seconds in steps.items()
        if seconds
    }
    return Precedent(similar.name, scaled, throughput)


def shape_of(sample: SpeedSample) -> RingShape:
    """Return the size that was measured."""
    return resized(sample, sample.nodes)


def resized(sample: SpeedSample, nodes: int) -> RingShape:
    """Return the size of a job with another number of the same nodes."""
    replicas = sample.replicas // sample.nodes * nodes
    batch = max(1, round(sample.total_batch / replicas)) if sample.total_batch else 1
    return RingShape(nodes, replicas, batch)


def _whole_step(sample: brain.Sample) -> RingSample:
    """Return a step of all passes as one pass, which is how a job sees its own steps."""
    shape, passes = ring_shape(sample.shape), sample.shape.passes
    total, compute = shape.replicas * shape.batch * passes, sample.compute_seconds
    return RingSample(
        RingShape(shape.nodes, shape.replicas, shape.batch * passes),
        total / sample.throughput,
        None if compute is None else compute * passes,
    )


def _expected(
    found: Sequence[RingSample], own: Sequence[SpeedSample]
) -> list[tuple[SpeedSample, float]]:
    """Return each sample with the seconds of a similar job's step: measured, or by its model."""
    model = fit_ring(found)
    expected = []
    for sample in own:
        shape = shape_of(sample)
        predicted = float(model.step_time(shape.nodes, shape.replicas, shape.batch))
        expected.append((sample, _measured(found, shape) or predicted))
    return expected


def _measured(samples: Sequence[RingSample], shape: RingShape) -> float:
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
