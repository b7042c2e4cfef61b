"""The operator's own all-or-nothing wait: a job that cannot be placed as a whole gives way to another one.

Pods cannot be held back here until all of them fit: that is a scheduler's work. But of two jobs of which each
has a part of what both need, neither starts. So one of them gives its pods back for a while:

* A job *waits* while less than its minimum of nodes has a machine. It *holds* something if one has.
* Waiting jobs are ordered by the priority of their pods, the highest first, then by how often they have given
  way already, then by age, the oldest first. Of those that hold something the last one gives way, if any
  other job waits before it. Those that gave way less go last, so that a job that can never be placed does
  not keep another one from starting for ever.
* It does so when nothing of this has changed for its time, which begins again for all when one gives way. It
  comes back after the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dlrover.kubernetes import commands, pods, times
from dlrover.kubernetes.types import ElasticJob, ElasticJobStatus

Manifest = dict[str, Any]


class Claim(NamedTuple):
    """What other jobs need to know of one. Times are seconds since 1970."""

    key: str
    waits: bool
    holds: bool
    priority: int
    yields: int
    created: float
    since: float
    """When it began to wait."""
    yielded: float
    """When it gave way last; 0 if it never did."""

    @property
    def order(self) -> tuple[int, int, float, str]:
        """Its place among those that wait."""
        return (-self.priority, -self.yields, self.created, self.key)


def placed(nodes: Iterable[Manifest]) -> int:
    """How many of a job's pods have a machine, and have not ended."""
    return sum(
        bool(pod["spec"].get("nodeName"))
        for pod in nodes
        if not pods.ended(pod) and not pods.leaving(pod)
    )


def is_placed(job: ElasticJob, nodes: Iterable[Manifest]) -> bool:
    """Whether the job's minimum of nodes is placed."""
    return placed(nodes) >= commands.fewest_nodes(job)


def claim(job: ElasticJob, status: ElasticJobStatus, nodes: Sequence[Manifest]) -> Claim | None:
    """What a job claims by its status and its nodes' pods; None if it takes no part."""
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
    """Seconds until the job gives way; None if it does not as things are.

    Args:
        own: Its own claim.
        others: Those of all others.
        after: Seconds for which nothing must have changed.
        now: The time.
    """
    others = [one for one in others if one.key != own.key]
    waiting = [one for one in others if one.waits]
    last = own.holds and all(one.order < own.order for one in waiting if one.holds)
    if not own.waits or not last or not any(one.order < own.order for one in waiting):
        return None
    changed = max([own.since, own.yielded, *(one.yielded for one in others)])
    changed = max([changed, *(one.since for one in waiting)])
    return max(0.0, changed + after - now)
