"""Estimates from similar past jobs: a new job's first resources, and how long it may take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlrover.planning.shapes import allowed
from dlrover.spec import brain
from dlrover.spec.plan import NodeGroup, ResourcePlan

SIMILAR = 5
"""Number of past jobs from which a first plan is made."""
KEPT = 0.5
"""Weight of the mean of the less similar jobs when a more similar one is added."""
FIRST_SECONDS = 600.0
"""Minimum expected seconds of a job on its smallest size if nothing is known about it."""
LEAST_SIMILARITY = 0.5
"""Minimum similarity of a job that serves as a guide."""


@dataclass(frozen=True)
class PastJob:
    """A job that ended successfully."""

    name: str
    features: Mapping[str, str | float]
    """Its properties: user, model, parameters, batch, dataset."""
    groups: Mapping[str, NodeGroup]
    """Its resources at its end."""


def similarity(one: Mapping[str, str | float], other: Mapping[str, str | float]) -> float:
    """Return how alike two jobs are, from 0 to 1: the mean over the features of both.

    Equal texts count 1; numbers count the smaller one divided by the larger one. A feature that only one of
    them has counts 0.
    """
    names = {*one, *other}
    if not names:
        return 0.0
    return sum(_alike(one.get(name), other.get(name)) for name in names) / len(names)


def warm_start(features: Mapping[str, str | float], past: Sequence[PastJob]) -> ResourcePlan | None:
    """Return a first plan from the most similar past jobs; None if none is similar enough.

    The jobs' resources are smoothed exponentially from the least to the most similar one, as in
    DLRover-RM (VLDB 2024). Counts are rounded. Memory is the largest that was needed, which is cheaper
    than an OOM.
    """
    ranked = sorted(past, key=lambda job: similarity(features, job.features))[-SIMILAR:]
    near = [job for job in ranked if similarity(features, job.features) >= LEAST_SIMILARITY]
    if not near:
        return None
    best = near[-1]
    groups = {kind: _smoothed(kind, near) for kind in best.groups}
    alike = similarity(features, best.features)
    return ResourcePlan(
        groups=groups,
        reason=(
            f"started from {len(near)} similar past {'job' if len(near) == 1 else 'jobs'}, "
            f"the nearest is {best.name} (similarity {alike:.2f})"
        ),
    )


def first_plan(description: brain.Description, past: Sequence[PastJob]) -> ResourcePlan:
    """Return a job's first plan: like similar past jobs, within what its user has set."""
    kinds = ("worker", "ps") if description.strategy == "ps" else ("worker",)
    found = warm_start(description.features, past)
    reason = (
        found.reason if found else "no similar past job is known: the job starts with its minimum"
    )
    space = {"worker": description.space.workers, "ps": description.space.servers}
    groups = {}
    for kind in kinds:
        guess = found.groups.get(kind) if found else None
        counts = allowed(space[kind])
        count = max((n for n in counts if guess and n <= guess.count), default=counts[0])
        groups[kind] = _given(description.groups.get(kind), guess, count)
    return ResourcePlan(groups=groups, reason=reason)


def _given(given: NodeGroup | None, guess: NodeGroup | None, count: int) -> NodeGroup:
    """Return a group with what the user has set, completed by what was guessed."""
    given, guess = given or NodeGroup(count=count), guess or NodeGroup(count=count)
    return NodeGroup(
        count=count,
        cpu=given.cpu or guess.cpu,
        memory=given.memory or guess.memory,
        accelerators=given.accelerators or guess.accelerators,
    )


def expected_remaining(done: float, past: Sequence[float], first: float) -> float:
    """Estimate how much work a job still has, from the total work of similar jobs.

    Without a past job that had more, a job is expected to need as much again as it has done: that is
    the mean of what is left if few jobs are much longer than most.

    Args:
        done: Work that the job has done, in any unit.
        past: Total work of similar past jobs.
        first: Work expected of a job that has done nothing, without past jobs.
    """
    longer = [total - done for total in past if total > done]
    if longer:
        return sum(longer) / len(longer)
    return max(done, first)


def _smoothed(kind: str, near: Sequence[PastJob]) -> NodeGroup:
    groups = [job.groups[kind] for job in near if kind in job.groups]
    count, cpu, accelerators = (
        _smooth([float(getattr(group, name)) for group in groups])
        for name in ("count", "cpu", "accelerators")
    )
    return NodeGroup(
        count=max(1, round(count)),
        cpu=math.ceil(cpu * 10 - 1e-9) / 10,
        memory=max(group.memory for group in groups),
        accelerators=round(accelerators),
    )


def _smooth(values: Sequence[float]) -> float:
    mean = values[0]
    for value in values[1:]:
        mean = KEPT * mean + (1 - KEPT) * value
    return mean


def _alike(one: str | float | None, other: str | float | None) -> float:
    if one is None or other is None:
        return 0.0
    if isinstance(one, str) or isinstance(other, str):
        return float(one == other)
    if one == other:
        return 1.0
    if one <= 0 or other <= 0:
        return 0.0
    return min(one, other) / max(one, other)
