"""The reconciliation of one ElasticJob: a pure function from the observed state to the next actions.

It receives all observations and keeps no memory beyond the job's own status. So it may run at any time, any
number of times, and after any failure. Times are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine import objects, pods, record, tls, yielding
from dlrover.kubernetes.machine.decisions import (
    Certificate,
    Decision,
    Deletion,
    Event,
    Observed,
    Options,
    condition,
    merged,
    status_of,
)
from dlrover.kubernetes.machine.step import Step, deletion
from dlrover.kubernetes.resources import commands, names, times
from dlrover.kubernetes.resources.types import Condition, ElasticJobStatus, MasterStatus

Manifest = dict[str, Any]

QUICK = 60.0
"""Seconds below which a master's life counts as short; repeated short lives delay its restart ever longer."""
LONGEST_DELAY = 60.0
"""Maximum seconds before a master is restarted."""
MEMORY_GROWTH = 2.0
"""Memory multiplier for a master relative to its predecessor that ran out of memory."""
MOST_MEMORY = 8.0
"""Maximum memory multiplier relative to the first master."""
QUICK_ENDS = 5
"""Consecutive short-lived masters after which another infrastructure failure within `QUICK` fails the job."""
CREATION_SLACK = 5.0
"""Seconds allowed between the decision to start a master and its pod's creation."""
TOO_LATE = "DeadlineExceeded"
"""Failure reason of a job that exceeded its active deadline."""
FOREIGN_CHECK = 5.0
"""Seconds before checking again whether another owner's pod has gone."""


def reconcile(seen: Observed, now: float, options: Options, token: str) -> Decision:
    """Return what to do for a job.

    Args:
        seen: The observed state.
        now: The current time.
        options: The operator's options.
        token: A fresh secret for a job that has none yet.
    """
    manifest = seen.job
    spec = manifest.get("spec")
    managed_by = spec.get("managedBy") if isinstance(spec, Mapping) else None
    if manifest["metadata"].get("deletionTimestamp") or managed_by not in (
        None,
        "",
        names.MANAGER,
    ):
        return Decision()
    old = status_of(manifest)
    try:
        running = record.resolve(manifest)
    except ConfigurationError as error:
        if not (_suspends(manifest) and (old.phase == "Suspended" or _has_pods(seen))):
            return _rejected(manifest, old, str(error), now)
        running = record.stopped(manifest, str(error))
    return _Step(running, seen, old, now, options, token).decide()


def delay(quick_ends: int) -> float:
    """Return the seconds to wait before a master starts after this many short-lived ones in a row."""
    return 0.0 if quick_ends < 2 else min(LONGEST_DELAY, 2.0**quick_ends)


def _suspends(manifest: Manifest) -> bool:
    """Return whether a manifest, even an invalid one, suspends its job."""
    spec = manifest.get("spec")
    return isinstance(spec, Mapping) and spec.get("suspend") is True


def _has_pods(seen: Observed) -> bool:
    uid = seen.job["metadata"].get("uid", "")
    return any(pods.owned(pod, uid) for pod in seen.pods)


def _rejected(manifest: Manifest, old: ElasticJobStatus, why: str, now: float) -> Decision:
    """Start nothing: the manifest is invalid and the job never ran from another one."""
    generation = manifest["metadata"].get("generation", 0)
    accepted = condition("Accepted", False, "Invalid", why, generation)
    told = any(c.type == "Accepted" and c.message == why for c in old.conditions)
    status = msgspec.structs.replace(
        old,
        phase=old.phase if old.phase not in ("", "Created") else "Rejected",
        message=why,
        observed_generation=generation,
        conditions=merged(old.conditions, [accepted], now),
    )
    events = () if told else (Event("Rejected", why, warning=True),)
    return Decision(status=status, events=events)


class _Step(Step):
    """One decision about a valid job."""

    def decide(self) -> Decision:
        self._accept()
        if self.old.completion_time:
            return self._finished()
        if self.job.spec.suspend or (self.old.phase == "Suspended" and self._removing()):
            return self._suspended()
        left = self._time_left()
        if left is not None and left <= 0 and (self.master is None or not pods.ended(self.master)):
            return self._too_late()
        if self._away() > 0 or (self.old.phase == "Yielded" and self._removing()):
            return self._stays_away()
        return self._start() if self.master is None else self._goes_on(self.master)

    def _goes_on(self, master: Manifest) -> Decision:
        if pods.ended(master):
            return self._master_ended(master)
        if pods.leaving(master):
            return self._master_leaves(master)
        missing = objects.missing_labels(self.job, master)
        return self._unlabelled(master, missing) if missing else self._runs(master)

    def _unlabelled(self, master: Manifest, missing: list[str]) -> Decision:
        """Replace a master's pod that has lost a label by which nodes and operator find it."""
        message = f"The master's pod lost its label {', '.join(missing)}, by which it is found."
        self.events.append(Event("MasterLost", f"{message} It is started again.", warning=True))
        return self._restarting(message, delete=(deletion(master),))

    # ---- the cases

    def _finished(self) -> Decision:
        ended_at = times.read(self.old.completion_time) or self.now
        after = self.job.spec.ttl_seconds_after_finished
        if after is not None and self.now >= ended_at + after:
            gone = Deletion("ElasticJob", self.job.name, self.job.uid)
            event = Event("Deleted", f"The job ended {after} s ago (ttlSecondsAfterFinished).")
            return Decision(delete=(gone,), events=(event,))
        return self._decision(
            self.old.phase,
            self.old.message,
            delete=self._clean(),
            again=None if after is None else ended_at + after - self.now,
        )

    def _too_late(self) -> Decision:
        seconds = self.job.spec.active_deadline_seconds
        message = f"The job was active for {seconds} s (spec.activeDeadlineSeconds)."
        end = pods.End(final=True, succeeded=False, reason=TOO_LATE, message=message)
        return replace(self._complete(end), delete=self._stopped())

    def _stopped(self) -> tuple[Deletion, ...]:
        """Return the pods to delete for a stopped job, the master first: it would replace its workers."""
        running = [pod for pod in self.others if not pods.ended(pod)]
        master = self.master
        if master is not None and not (pods.ended(master) or pods.leaving(master)):
            running = [master]
        return tuple(deletion(pod) for pod in running if not pods.leaving(pod))

    def _clean(self) -> tuple[Deletion, ...]:
        if any(c.type == "Failed" and c.reason == TOO_LATE for c in self.old.conditions):
            stopped = self._stopped()
            if stopped:
                return stopped
        policy = self.job.spec.clean_pod_policy
        if policy == "None":
            return ()
        everyone = [*self.others, *([self.master] if self.master is not None else [])]
        wanted = everyone if policy == "All" else [p for p in self.others if not pods.ended(p)]
        return tuple(deletion(pod) for pod in wanted if not pods.leaving(pod))

    def _suspended(self) -> Decision:
        left = len(self.others) + (self.master is not None)
        message = f"{left} pods are ending." if left else "The job is suspended: it has no pods."
        if self.old.phase != "Suspended":
            self.events.append(
                Event("Suspended", "spec.suspend is true: the job's pods are removed.")
            )
        changed = [
            self._condition("Suspended", not left, "Ending" if left else "Suspended", message),
            self._condition("MasterReady", False, "Suspended"),
        ]
        return self._without_pods("Suspended", message, changed)

    def _without_pods(
        self,
        phase: str,
        message: str,
        changed: Sequence[Condition],
        again: float | None = None,
        **fields: Any,
    ) -> Decision:
        """Remove the job's pods, the master first: it would replace its workers.

        The record of their spec is kept until none is left.
        """
        left = self.others or self.master is not None
        going = [self.master] if self.master is not None else self.others
        delete = tuple(deletion(pod) for pod in going if not pods.leaving(pod))
        if self.master is not None:
            again = self._force_after(self.master)
        forced, delete = self._forced(self.master, delete)
        again = None if forced else again
        return self._decision(
            phase,
            message,
            delete=delete,
            again=again,
            changed=changed,
            running_spec=self.running.record if left else "",
            **fields,
        )

    def _removing(self) -> bool:
        """Return whether pods remain to be removed or have just gone; no new master may find them."""
        return bool(self.old.running_spec or (self.master is None and self.others))

    def _yield(self, after: int) -> Decision:
        """Release the pods to a job that waits ahead of this one."""
        least = commands.fewest_nodes(self.job)
        message = (
            f"{yielding.placed(self.others)} of at least {least} nodes were placed while another job "
            f"waits: the job gives its pods back and asks for them again in {after} s."
        )
        self.events.append(Event("Yielded", message, warning=True))
        changed = [self._condition("MasterReady", False, "Yielded")]
        yields, now = self.old.yields + 1, times.written(self.now)
        return self._without_pods(
            "Yielded", message, changed, float(after), yields=yields, last_yield_time=now
        )

    def _stays_away(self) -> Decision:
        changed = [self._condition("MasterReady", False, "Yielded")]
        return self._without_pods(
            "Yielded", self.old.message, changed, max(0.0, self._away()) or None
        )

    def _away(self) -> float:
        """Return the seconds for which the job still leaves its place to another one."""
        last = times.read(self.old.last_yield_time)
        if self.old.phase != "Yielded" or self._yields is None or last is None:
            return 0.0
        return last + self._yields - self.now

    def _master_ended(self, master: Manifest) -> Decision:
        end = pods.end_of_master(master)
        quick = end.lived < QUICK and self.old.master.quick_ends < QUICK_ENDS
        if end.final and not (end.reason == "Infrastructure" and quick):
            return self._complete(end)
        factor, more = self.old.master.memory_factor, ""
        if end.reason == "OOMKilled":  # read from the pod, so that a repeated decision is the same
            factor = min(MOST_MEMORY, pods.memory_factor(master) * MEMORY_GROWTH)
            more = f" with {factor:g} times the memory of the first one"
        lost = f"{end.message} It is started again{more}."
        self.events.append(Event("MasterLost", lost, warning=True))
        delete = () if pods.leaving(master) else (deletion(master),)
        remembered = msgspec.structs.replace(self.old.master, memory_factor=factor)
        return self._restarting(end.message, delete=delete, master=remembered)

    def _master_leaves(self, master: Manifest) -> Decision:
        forced, delete = self._forced(master, ())
        again = None if forced else self._force_after(master)
        return self._restarting("The master's pod is being deleted.", delete=delete, again=again)

    def _start(self) -> Decision:
        if self.foreign is not None:
            return self._make_room(self.foreign)
        before = self.old.master
        pause = delay(before.quick_ends)
        quick_ends = before.quick_ends + 1 if before.starts and self._lived() < QUICK + pause else 0
        wait = pause - self._lived()
        if before.starts and wait > 0:
            return self._restarting("The master is started again soon.", again=wait)
        if self._is("Suspended"):
            self.events.append(Event("Resumed", "spec.suspend is false: the job goes on."))
        anew = self._is("Suspended") or self.old.phase == "Yielded" or not before.starts
        if anew:
            quick_ends = 0
        number = before.starts + 1
        self.events.append(self._started(number))
        started = MasterStatus(
            starts=number,
            last_start_time=times.written(self.now),
            quick_ends=quick_ends,
            memory_factor=before.memory_factor,
        )
        job = self.job
        began = "" if self._is("Suspended") else self.old.start_time
        began = began or times.written(self.now)
        decision = self._decision(
            "Restarting" if before.starts else "Created",
            f"Master {number} of the job is started.",
            master=started,
            start_time=began,
            running_spec=self.running.record,
            changed=[
                self._condition("Suspended", False, "Resumed"),
                self._condition("MasterReady", False, "Starting"),
                *([self._condition("Placed", False, "Waits")] if anew and self._yields else []),
            ],
        )
        secret, group = objects.certificate(job), objects.pod_group(job)
        return replace(
            decision,
            ensure=(
                *objects.account(job),
                objects.secret(job, self.token),
                objects.service(job),
                *([group] if group is not None else []),
            ),
            certificate=None if secret is None else Certificate(secret, tls.hosts(job)),
            start=objects.master_pod(job, self.options.master_image, before.memory_factor),
        )

    def _make_room(self, foreign: Manifest) -> Decision:
        """Handle a foreign pod with the master's name; delete one of an earlier job of this name."""
        references = foreign["metadata"].get("ownerReferences") or ()
        earlier = any(
            one.get("kind") == "ElasticJob" and one.get("name") == self.job.name
            for one in references
        )
        delete = (deletion(foreign),) if earlier and not pods.leaving(foreign) else ()
        message = f"The pod {pods.name(foreign)} is not this job's: it has to go first."
        if message != self.old.message and not delete:
            self.events.append(Event("NameTaken", message, warning=True))
        return self._decision("Pending", message, delete=delete, again=FOREIGN_CHECK)

    def _runs(self, master: Manifest) -> Decision:
        is_ready = pods.ready(master)
        active = self._active()
        why = pods.obstacle([master, *self.others]) or self.old.training.waits
        wanted = self._wanted()
        if is_ready and active:
            phase, message = "Running", why or f"{active} of {wanted} workers run."
        elif self.old.master.starts > 1 and self.old.phase == "Restarting" and not is_ready:
            phase, message = "Restarting", why or "The master starts."
        else:
            phase = "Pending"
            message = why or ("The workers start." if is_ready else "The master starts.")
        if is_ready and not self._is("MasterReady"):
            self.events.append(Event("MasterReady", "The master takes connections."))
        missing = () if self.seen.service is not None else (objects.service(self.job),)
        reason = "Ready" if is_ready else "Starting"
        changed = [
            self._condition("Suspended", False, "Resumed"),
            self._condition("MasterReady", is_ready, reason),
        ]
        again: float | None = None
        if self._yields is not None and not self._is("Placed"):
            if yielding.is_placed(self.job, self.others):
                changed.append(self._condition("Placed", True, "Placed"))
            else:
                again = self._patience(self._yields)
                if again == 0.0:
                    return self._yield(self._yields)
        remembered = self._remembered(master)
        if remembered:  # the server accepted it, but the response was lost
            self.events.insert(0, self._started(remembered["master"].starts))
        decision = self._decision(
            phase,
            message,
            changed=changed,
            again=again,
            running_spec=self.running.record,
            **remembered,
        )
        return replace(decision, ensure=missing)

    @property
    def _yields(self) -> int | None:
        """Seconds after which the job yields; None if it never does."""
        return self.job.spec.gang.yield_after_seconds

    def _patience(self, after: int) -> float:
        """Return the seconds until the job yields or checks again whether it should."""
        own = yielding.claim(self.job, self.old, self.others)
        assert own is not None
        left = yielding.time_left(own, self.seen.rivals, after, self.now)
        return float(after) if left is None else left

    # ---- parts of the cases

    def _complete(self, end: pods.End) -> Decision:
        phase = "Succeeded" if end.succeeded else "Failed"
        self.events.append(Event(phase, end.message, warning=not end.succeeded))
        after = self.job.spec.ttl_seconds_after_finished
        return self._decision(
            phase,
            end.message,
            delete=self._clean(),
            again=None if after is None else float(after),
            completion_time=times.written(self.now),
            changed=[
                self._condition(phase, True, end.reason, end.message),
                *([self._condition("Complete", True, end.reason)] if end.succeeded else []),
                self._condition("MasterReady", False, "Ended"),
            ],
        )

    def _restarting(
        self,
        why: str,
        delete: tuple[Deletion, ...] = (),
        again: float | None = None,
        **fields: Any,
    ) -> Decision:
        changed = [self._condition("MasterReady", False, "Lost", why)]
        return self._decision(
            "Restarting", why, delete=delete, again=again, changed=changed, **fields
        )

    def _started(self, number: int) -> Event:
        return Event("MasterStarted", f"Master {number} of the job is started.")

    def _remembered(self, master: Manifest) -> Manifest:
        """Return the status fields for a master whose start was not recorded; empty if it was."""
        text = str(master["metadata"].get("creationTimestamp") or "")
        created = times.read(text)
        before = self.old.master
        last = times.read(before.last_start_time)
        if created is None or (last is not None and created <= last + CREATION_SLACK):
            return {}
        started = msgspec.structs.replace(
            before, starts=before.starts + 1, last_start_time=times.written(created)
        )
        return {"master": started, "start_time": self.old.start_time or started.last_start_time}

    def _lived(self) -> float:
        """Return the seconds since the last master was started."""
        started = times.read(self.old.master.last_start_time)
        return QUICK if started is None else self.now - started
