"""What every decision about a valid job needs: what there is of it, and the status that is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dlrover.kubernetes import names, pods, times, yielding
from dlrover.kubernetes.decisions import (
    Decision,
    Deletion,
    Event,
    Observed,
    Options,
    condition,
    merged,
)
from dlrover.kubernetes.types import Condition, ElasticJob, ElasticJobStatus

Manifest = dict[str, Any]

FORCE_AFTER = 30.0
"""Seconds beyond its own grace after which a master's pod that does not go is deleted by force.

Its machine is lost. Its service account's token ends with the pod, so it can do nothing more.
"""


class Step:
    """The state of one decision: a job, its pods, its status before, and what is told."""

    def __init__(
        self,
        job: ElasticJob,
        seen: Observed,
        old: ElasticJobStatus,
        now: float,
        options: Options,
        token: str,
    ) -> None:
        self.job, self.seen, self.old, self.now = job, seen, old, now
        self.options, self.token = options, token
        uid = job.metadata.get("uid", "")
        master = names.master_name(job.name)
        named = [pod for pod in seen.pods if pods.name(pod) == master]
        self.master = next((pod for pod in named if pods.owned(pod, uid)), None)
        self.foreign = named[0] if named and self.master is None else None
        self.others = [
            pod for pod in seen.pods if pods.owned(pod, uid) and pods.name(pod) != master
        ]
        self.events: list[Event] = []
        self.generation: int = job.metadata.get("generation", 0)

    def _forced(
        self, master: Manifest | None, delete: tuple[Deletion, ...]
    ) -> tuple[bool, tuple[Deletion, ...]]:
        """Add the deletion by force of a master's pod that should have gone."""
        if master is None or not pods.leaving(master) or self._force_after(master) > 0:
            return False, delete
        message = (
            "The master's pod did not go in time, as on a lost machine: it is deleted by force."
        )
        self.events.append(Event("MasterForced", message, warning=True))
        return True, (*delete, deletion(master, grace=0))

    def _force_after(self, master: Manifest) -> float:
        """Seconds until a leaving pod is deleted by force."""
        due = times.read(master["metadata"].get("deletionTimestamp") or "")
        return (self.now if due is None else due) + FORCE_AFTER - self.now

    def _is(self, kind: str) -> bool:
        return any(c.type == kind and c.status == "True" for c in self.old.conditions)

    def _condition(self, kind: str, status: bool, reason: str, message: str = "") -> Condition:
        return condition(kind, status, reason, message, self.generation)

    def _wanted(self) -> int:
        worker = self.job.spec.replica_specs.get("worker")
        return worker.replicas if worker else 0

    def _active(self) -> int:
        counted = pods.count(self.others).get("worker")
        return counted.active if counted else 0

    def _decision(
        self,
        phase: str,
        message: str,
        *,
        delete: tuple[Deletion, ...] = (),
        again: float | None = None,
        changed: Sequence[Condition] = (),
        **fields: Any,
    ) -> Decision:
        accepted = self._condition("Accepted", True, "Valid")
        counted = pods.count(self.others)
        workers = counted.get("worker")
        status = msgspec.structs.replace(
            self.old,
            phase=phase,
            message=message,
            observed_generation=self.generation,
            conditions=merged(self.old.conditions, [accepted, *changed], self.now),
            workers=f"{self._active()}/{self._wanted()}",
            replicas=workers.pending + workers.active if workers else 0,
            selector=f"{names.JOB_LABEL}={self.job.name},{names.ROLE_LABEL}=worker",
            replica_statuses=counted,
            **fields,
        )
        claim = yielding.claim(self.job, status, self.others)
        events = tuple(self.events)
        return Decision(delete=delete, status=status, events=events, claim=claim, again=again)


def deletion(pod: Manifest, grace: int | None = None) -> Deletion:
    """The deletion of a pod."""
    return Deletion("Pod", pods.name(pod), pod["metadata"].get("uid", ""), grace)
