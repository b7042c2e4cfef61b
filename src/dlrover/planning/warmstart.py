"""What similar past jobs say about a new one: first resources, and how long it may take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlrover.spec.plan import Group, Plan

SIMILAR = 5
"""Past jobs that a first plan is made from."""
KEPT = 0.5
"""What each more similar job leaves of the mean of the less similar ones."""
FIRST_SECONDS = 600.0
"""How long a job of which nothing is known is expected to run on its smallest size at least."""
LEAST_SIMILARITY = 0.5
"""Jobs less similar than this are no guide."""


@dataclass(frozen=True)
class PastJob:
    """A job that ended well."""

    name: str
    features: Mapping[str, str | float]
    """What it was: user, model, parameters, batch, dataset."""
    groups: Mapping[str, Group]
    """What it had at its end."""


def similarity(one: Mapping[str, str | float], other: Mapping[str, str | float]) -> float:
    """How alike two jobs are, from 0 to 1: the mean over the features of both.

    A text counts 1 if it is the same; a number counts the smaller one divided by the larger one. A feature
    that only one of them has counts 0.
    """
    names = {*one, *other}
    if not names:
        return 0.0
    return sum(_alike(one.get(name), other.get(name)) for name in names) / len(names)


def warm_start(features: Mapping[str, str | float], past: Sequence[PastJob]) -> Plan | None:
    """A first plan from the most similar past jobs; None if none is similar enough.

    The jobs' resources are smoothed exponentially from the least to the most similar one, as in
    DLRover-RM (VLDB 2024). Counts are rounded, memory is the largest one that was needed: it is cheaper
    than an OOM.
    """
    ranked = sorted(past, key=lambda job: similarity(features, job.features))[-SIMILAR:]
    near = [job for job in ranked if similarity(features, job.features) >= LEAST_SIMILARITY]
    if not near:
        return None
    best = near[-1]
    groups = {kind: _smoothed(kind, near) for kind in best.groups}
    alike = similarity(features, best.features)
    return Plan(
        groups=groups,
        reason=(
            f"started from {len(near)} similar past {'job' if len(near) == 1 else 'jobs'}, "
            f"the nearest is {best.name} (similarity {alike:.2f})"
        ),
    )


def expected_remaining(done: float, past: Sequence[float], first: float) -> float:
    """How much work a job still has, by how much similar jobs had in all.

    Without a past job that had more, a job is expected to need as much again as it has done: that is
    the mean of what is left where few jobs are much longer than most.

    Args:
        done: Work that the job has done, in any unit.
        past: Work that similar past jobs had in all.
        first: What is expected of a job that has done nothing, if there are no past jobs.
    """
    longer = [total - done for total in past if total > done]
    if longer:
        return sum(longer) / len(longer)
    return max(done, first)


def _smoothed(kind: str, near: Sequence[PastJob]) -> Group:
    groups = [job.groups[kind] for job in near if kind in job.groups]
    count, cpu, accelerators = (
        _smooth([float(getattr(group, name)) for group in groups])
        for name in ("count", "cpu", "accelerators")
    )
    return Group(
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
