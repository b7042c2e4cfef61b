"""The operator's own all-or-nothing wait: a job that cannot be placed completely yields to another one.

Only a scheduler can hold pods back until all of them fit. Without one, two jobs may each hold part of what
both need, so that neither starts. So one of them releases its pods for a while:

* A job *waits* while fewer nodes than its minimum have a machine. It *holds* something if at least one has.
* Waiting jobs are ordered by the priority of their pods (highest first), then by how often they have yielded
  (most often first), then by age (oldest first). Of those that hold something, the last one yields if any
  other job waits before it. Jobs that yielded less often come last, so that a job that can never be placed
  does not keep another one from starting forever.
* A job yields once none of this has changed for its configured time, which restarts for all jobs when one
  yields. It returns after the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dlrover.kubernetes.machine import pods
from dlrover.kubernetes.resources import commands, times
from dlrover.kubernetes.resources.types import ElasticJob, ElasticJobStatus, Manifest


class Claim(NamedTuple):
    """A job's state as other jobs need it. Times are seconds since 1970."""

    key: str
    waits: bool
    holds: bool
    priority: int
    yields: int
    created: float
    since: float
    """When it began to wait."""
    yielded: float
    """When it last yielded; 0 if never."""

    @property
    def order(self) -> tuple[int, int, float, str]:
        """Its sort key among the waiting jobs."""
        return (-self.priority, -self.yields, self.created, self.key)


def placed(nodes: Iterable[Manifest]) -> int:
    """Return how many of a job's pods have a machine and are neither ended nor leaving."""
    return sum(
        bool(pod["spec"].get("nodeName"))
        for pod in nodes
        if not pods.ended(pod) and not pods.leaving(pod)
    )


def is_placed(job: ElasticJob, nodes: Iterable[Manifest]) -> bool:
    """Return whether the job's minimum of nodes is placed."""
    return placed(nodes) >= commands.fewest_nodes(job)


def claim(job: ElasticJob, status: ElasticJobStatus, nodes: Sequence[Manifest]) -> Claim | None:
    """Return a job's claim from its status and its nodes' pods; None if it takes no part."""
    if job.spec.gang.yield_after_seconds is None:
        return None
    has_been = any(c.type == "Placed" and c.status == "True" for c in status.conditions)
    lives = status.phase in ("Created", "Pending", "Restarting", "Running")
    return Claim(
        key=f"{job.namespace}/{job.name}",
        waits=lives and not has_been,
        holds=placed(nodes) > 0,
        priority=max((int(pod["spec"].get("priority") or 0) for pod in nodes), default=0),
        yields=status.yields,
        created=times.read(str(job.metadata.get("creationTimestamp") or "")) or 0.0,
        since=times.read(status.master.last_start_time) or 0.0,
        yielded=times.read(status.last_yield_time) or 0.0,
    )


def time_left(own: Claim, others: Iterable[Claim], after: float, now: float) -> float | None:
    """Return the seconds until the job yields; None if the current claims do not require it.

    Args:
        own: The job's own claim.
        others: The claims of all jobs; its own is ignored.
        after: Seconds without a change before it yields.
        now: The current time.
    """
    others = [one for one in others if one.key != own.key]
    waiting = [one for one in others if one.waits]
    last = own.holds and all(one.order < own.order for one in waiting if one.holds)
    if not own.waits or not last or not any(one.order < own.order for one in waiting):
        return None
    changes = [own.since, own.yielded]
    changes += [one.yielded for one in others] + [one.since for one in waiting]
    changed = max((at for at in changes if at <= now), default=0.0)  # others: a clock was set back
    return max(0.0, changed + after - now)
