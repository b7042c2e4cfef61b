"""One look at a valid job: what the operator observes, and the decision that results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from dlrover.kubernetes.machine import decisions, pods, yielding
from dlrover.kubernetes.machine.decisions import Decision, Deletion, JobNotice, Observed
from dlrover.kubernetes.machine.record import Running
from dlrover.kubernetes.resources import compatibility, names, times
from dlrover.kubernetes.resources.types import Condition, ElasticJobStatus, Manifest

FORCE_AFTER = 30.0
"""Seconds beyond its grace period after which a master's pod that does not end is deleted by force.

Its machine is lost. Its service account's token expires with the pod, so the pod can do nothing more.
"""


class View:
    """One look at a job: its pods, its previous status, and the events to report."""

    def __init__(self, running: Running, seen: Observed, old: ElasticJobStatus, now: float) -> None:
        self.running, self.job = running, running.job
        self.seen, self.old, self.now = seen, old, now
        uid = self.job.uid
        master = names.master_name(self.job.name)
        named = [pod for pod in seen.pods if pods.name(pod) == master]
        self.master = next((pod for pod in named if pods.owned(pod, uid)), None)
        self.foreign = named[0] if named and self.master is None else None
        """The pod of another owner that has the name of the job's master."""
        self.others = [
            pod for pod in seen.pods if pods.owned(pod, uid) and pods.name(pod) != master
        ]
        self.events: list[JobNotice] = []
        self.generation: int = self.job.metadata.get("generation", 0)
        worker = self.job.spec.replica_specs.get("worker")
        self.wanted = worker.replicas if worker else 0
        """Number of wanted workers."""
        self.counted = pods.count(self.others)
        workers = self.counted.get("worker")
        spares = self.job.spec.spares
        self.most = self.wanted if spares.replicas or spares.auto else sys.maxsize
        """Number of pods that can be workers; the others are spares, which are pods of the role, too."""
        self.active = min(workers.active, self.most) if workers else 0
        """Number of running workers."""
        self.yields_after = self.job.spec.gang.yield_after_seconds
        """Seconds after which the job yields; None if it never does."""

    def report(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Add an event."""
        self.events.append(JobNotice(reason, message, warning))

    def is_true(self, kind: str) -> bool:
        """Return whether a condition held before."""
        return any(c.type == kind and c.status == "True" for c in self.old.conditions)

    def condition(self, kind: str, status: bool, reason: str, message: str = "") -> Condition:
        """Return a condition about the current manifest."""
        return decisions.condition(kind, status, reason, message, self.generation)

    def time_left(self) -> float | None:
        """Return the seconds until the job's active deadline; None if it has none or is not active."""
        most = self.job.spec.active_deadline_seconds
        began = times.read(self.old.start_time)
        if most is None or began is None or self.is_true("Suspended"):
            return None
        return began + most - self.now

    def force_after(self, pod: Manifest) -> float:
        """Return the seconds until a leaving pod is deleted by force."""
        after = FORCE_AFTER if pod is self.master else pods.FORCE_AFTER
        return pods.force_after(pod, self.now, after)

    def forced(self) -> tuple[Deletion, ...]:
        """Return the forced deletion of the master's pod if it is overdue."""
        master = self.master
        if master is None or not pods.leaving(master) or self.force_after(master) > 0:
            return ()
        message = (
            "The master's pod did not end in time and is deleted by force; its machine may be lost."
        )
        self.report("MasterForced", message, warning=True)
        return (deletion(master, grace=0),)

    def forced_nodes(self) -> tuple[Deletion, ...]:
        """Return the forced deletions of the nodes' pods that are overdue."""
        overdue = [
            pod
            for pod in self.others
            if pods.leaving(pod) and not pods.ended(pod) and self.force_after(pod) <= 0
        ]
        for pod in overdue:
            message = f"Pod {pods.name(pod)} did not end in time and is deleted by force; its machine may be lost."
            self.report("PodForced", message, warning=True)
        return tuple(deletion(pod, grace=0) for pod in overdue)

    def held(self, among: Sequence[Manifest]) -> str:
        """Return which finalizers keep the first of these pods that only they keep, and report it once; else empty."""
        held = next(filter(None, map(pods.held, among)), "")
        said = [self.old.message, *(c.message for c in self.old.conditions)]
        if held and not any(held in one for one in said):
            self.report("PodHeld", held, warning=True)
        return held

    def report_manifest(self) -> None:
        """Report what is new about the manifest."""
        fault, unapplied = self.running.fault, self.running.unapplied
        before = next((c for c in self.old.conditions if c.type == "Accepted"), None)
        if fault:
            if before is None or before.message != fault:
                self.report("Rejected", self._despite(fault), warning=True)
            return
        if before is None or before.status != "True":
            self.report("Accepted", "The manifest is valid.")
        if before is None or before.observed_generation != self.generation:
            for note in compatibility.notes(self.seen.job["spec"]):
                self.report("NoEffect", note)
        known = any(c.type == "Applied" and c.message == unapplied for c in self.old.conditions)
        if unapplied and not known:
            self.report("NotApplied", unapplied, warning=True)

    def _of_manifest(self) -> list[Condition]:
        """Return the conditions about the manifest."""
        fault, unapplied = self.running.fault, self.running.unapplied
        if fault:
            return [self.condition("Accepted", False, "Invalid", fault)]
        accepted = self.condition("Accepted", True, "Valid")
        if unapplied:
            reason = "Ended" if self.old.completion_time else "AtNextStart"
            return [accepted, self.condition("Applied", False, reason, unapplied)]
        return [accepted, self.condition("Applied", True, "Applied")]

    def _despite(self, fault: str, message: str = "") -> str:
        """Return a fault and what happens to the job despite it."""
        if self.old.completion_time:
            return f"{fault} The job has ended."
        return f"{fault} {message if self.job.spec.suspend else 'The job continues unchanged.'}".rstrip()

    def decision(
        self,
        phase: str,
        message: str,
        *,
        delete: tuple[Deletion, ...] = (),
        again: float | None = None,
        changed: Sequence[Condition] = (),
        **fields: Any,
    ) -> Decision:
        """Return the decision with this state of the job; ``fields`` are further ones of its status."""
        if self.running.fault and not self.old.completion_time:
            message = self._despite(self.running.fault, message)
        left = self.time_left()
        if left is not None and left > 0 and not self.old.completion_time:
            again = left if again is None else min(again, left)
        conditions = [
            *self._of_manifest(),
            self.condition("Running", phase == "Running", phase),
            *changed,
        ]
        workers = self.counted.get("worker")
        replicas = min(workers.pending + workers.active, self.most) if workers else 0
        status = msgspec.structs.replace(
            self.old,
            phase=phase,
            message=message,
            observed_generation=self.generation,
            conditions=decisions.merged(self.old.conditions, conditions, self.now),
            workers="" if self.job.spec.roles else f"{self.active}/{self.wanted}",
            replicas=replicas,
            selector=f"{names.JOB_LABEL}={self.job.name},{names.ROLE_LABEL}=worker",
            replica_statuses=self.counted,
            **fields,
        )
        claim = yielding.claim(self.job, status, self.others)
        events = tuple(self.events)
        return Decision(delete=delete, status=status, events=events, claim=claim, again=again)


def deletion(pod: Manifest, grace: int | None = None) -> Deletion:
    """Return the deletion of a pod."""
    return Deletion("Pod", pods.name(pod), pod["metadata"].get("uid", ""), grace)
