"""The common basis of all decisions about a valid job: the observed state and the resulting status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dlrover.kubernetes.machine import pods, yielding
from dlrover.kubernetes.machine.decisions import (
    Decision,
    Deletion,
    Event,
    Observed,
    Options,
    condition,
    merged,
)
from dlrover.kubernetes.machine.record import Running
from dlrover.kubernetes.resources import compatibility, names, times
from dlrover.kubernetes.resources.types import Condition, ElasticJobStatus

Manifest = dict[str, Any]

FORCE_AFTER = 30.0
"""Seconds beyond its grace period after which a master's pod that does not end is deleted by force.

Its machine is lost. Its service account's token expires with the pod, so the pod can do nothing more.
"""


class Step:
    """The state of one decision: a job, its pods, its previous status and the events to report."""

    def __init__(
        self,
        running: Running,
        seen: Observed,
        old: ElasticJobStatus,
        now: float,
        options: Options,
        token: str,
    ) -> None:
        self.running, self.job = running, running.job
        self.seen, self.old, self.now = seen, old, now
        self.options, self.token = options, token
        uid = self.job.uid
        master = names.master_name(self.job.name)
        named = [pod for pod in seen.pods if pods.name(pod) == master]
        self.master = next((pod for pod in named if pods.owned(pod, uid)), None)
        self.foreign = named[0] if named and self.master is None else None
        self.others = [
            pod for pod in seen.pods if pods.owned(pod, uid) and pods.name(pod) != master
        ]
        self.events: list[Event] = []
        self.generation: int = self.job.metadata.get("generation", 0)

    def _accept(self) -> None:
        """Report what is new about the manifest."""
        fault, unapplied = self.running.fault, self.running.unapplied
        before = next((c for c in self.old.conditions if c.type == "Accepted"), None)
        if fault:
            if before is None or before.message != fault:
                self.events.append(Event("Rejected", self._despite(fault), warning=True))
            return
        if before is None or before.status != "True":
            self.events.append(Event("Accepted", "The manifest is valid."))
        if before is None or before.observed_generation != self.generation:
            notes = compatibility.notes(self.seen.job["spec"])
            self.events += [Event("NoEffect", note) for note in notes]
        known = any(c.type == "Applied" and c.message == unapplied for c in self.old.conditions)
        if unapplied and not known:
            self.events.append(Event("NotApplied", unapplied, warning=True))

    def _standing(self) -> list[Condition]:
        """Return the conditions about the manifest."""
        fault, unapplied = self.running.fault, self.running.unapplied
        if fault:
            return [self._condition("Accepted", False, "Invalid", fault)]
        accepted = self._condition("Accepted", True, "Valid")
        if unapplied:
            reason = "Ended" if self.old.completion_time else "AtNextStart"
            return [accepted, self._condition("Applied", False, reason, unapplied)]
        return [accepted, self._condition("Applied", True, "Applied")]

    def _despite(self, fault: str, message: str = "") -> str:
        """Return a fault and what happens to the job despite it."""
        if self.old.completion_time:
            return f"{fault} The job has ended."
        return f"{fault} {message if self.job.spec.suspend else 'The job goes on as it was before.'}".rstrip()

    def _forced(
        self, master: Manifest | None, delete: tuple[Deletion, ...]
    ) -> tuple[bool, tuple[Deletion, ...]]:
        """Add a forced deletion of a master's pod that is overdue; return whether one was added."""
        if master is None or not pods.leaving(master) or self._force_after(master) > 0:
            return False, delete
        message = (
            "The master's pod did not go in time, as on a lost machine: it is deleted by force."
        )
        self.events.append(Event("MasterForced", message, warning=True))
        return True, (*delete, deletion(master, grace=0))

    def _force_after(self, master: Manifest) -> float:
        """Return the seconds until a leaving pod is deleted by force."""
        due = times.read(master["metadata"].get("deletionTimestamp") or "")
        return (self.now if due is None else due) + FORCE_AFTER - self.now

    def _time_left(self) -> float | None:
        """Return the seconds until the job's active deadline; None if it has none or is not active."""
        most = self.job.spec.active_deadline_seconds
        began = times.read(self.old.start_time)
        if most is None or began is None or self._is("Suspended"):
            return None
        return began + most - self.now

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
        if self.running.fault and not self.old.completion_time:
            message = self._despite(self.running.fault, message)
        left = self._time_left()
        if left is not None and left > 0 and not self.old.completion_time:
            again = left if again is None else min(again, left)
        running = self._condition("Running", phase == "Running", phase)
        counted = pods.count(self.others)
        workers = counted.get("worker")
        status = msgspec.structs.replace(
            self.old,
            phase=phase,
            message=message,
            observed_generation=self.generation,
            conditions=merged(
                self.old.conditions, [*self._standing(), running, *changed], self.now
            ),
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
    """Return the deletion of a pod."""
    return Deletion("Pod", pods.name(pod), pod["metadata"].get("uid", ""), grace)
