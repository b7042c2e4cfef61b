"""The reconciliation of one ElasticJob: a pure function from the observed state to the next actions.

It receives all observations and keeps no memory beyond the job's own status. So it may run at any time, any
number of times, and after any failure. Times are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine import objects, pods, record, removal, tls, yielding
from dlrover.kubernetes.machine.decisions import (
    Certificate,
    Decision,
    Deletion,
    JobNotice,
    Observed,
    condition,
    merged,
    status_of,
)
from dlrover.kubernetes.machine.pods import QUICK
from dlrover.kubernetes.machine.view import View, deletion
from dlrover.kubernetes.resources import names, times
from dlrover.kubernetes.resources.types import ElasticJobStatus, Manifest, MasterStatus

MEMORY_GROWTH = 2.0
"""Memory multiplier for a master relative to its predecessor that ran out of memory."""
MOST_MEMORY = 8.0
"""Maximum memory multiplier relative to the first master."""
LONG = 3600.0
"""Seconds below which the life of a master that ended by an unexpected error counts as short."""
QUICK_ENDS = 5
"""Consecutive short-lived masters after which another infrastructure failure of one fails the job."""
FOREIGN_CHECK = 5.0
"""Seconds before checking again whether another owner's pod has gone."""
NOTICE_CHECK = 15.0
"""Seconds before deciding again about pods that their machines prepare: Events are requested in the background."""
_NOT_READY = "MasterNotReady"


def reconcile(seen: Observed, now: float, master_image: str, token: str) -> Decision:
    """Return what to do for a job.

    Args:
        seen: The observed state.
        now: The current time.
        master_image: Image of the master of a job that names none.
        token: A fresh secret for a job that has none yet.
    """
    manifest = seen.job
    spec = manifest.get("spec")
    spec = spec if isinstance(spec, Mapping) else {}  # it may be invalid
    ours = spec.get("managedBy") in (None, "", names.MANAGER)
    if manifest["metadata"].get("deletionTimestamp") or not ours:
        return Decision()
    if _is_left(seen):
        uid = manifest["metadata"].get("uid", "")
        return Decision(delete=(Deletion("ElasticJob", manifest["metadata"]["name"], uid),))
    old = status_of(manifest)
    try:
        running = record.resolve(manifest)
    except ConfigurationError as error:
        uid = manifest["metadata"].get("uid", "")
        has_pods = any(pods.owned(pod, uid) for pod in seen.pods)
        if spec.get("suspend") is not True or not (old.phase == "Suspended" or has_pods):
            return _rejected(manifest, old, str(error), now)
        running = record.stopped(manifest, str(error))
    view = View(running, seen, old, now)
    view.report_manifest()
    return _decide(view, master_image, token)


def _is_left(seen: Observed) -> bool:
    """Return whether a job is that of a role whose job of several roles has been suspended or has ended.

    A failed one is kept with its ended pods for their logs; if its own parent is gone, the garbage collector removes it.
    """
    above = objects.parent(seen.job["metadata"])
    if above is None or seen.parent is None or seen.parent["metadata"].get("uid") != above["uid"]:
        return False
    suspended = (seen.parent.get("spec") or {}).get("suspend") is True
    ended = bool(status_of(seen.parent).completion_time)
    return suspended or (ended and not status_of(seen.job).completion_time)


def _rejected(manifest: Manifest, old: ElasticJobStatus, why: str, now: float) -> Decision:
    """Start nothing: the manifest is invalid and the job never ran from another one."""
    generation = manifest["metadata"].get("generation", 0)
    accepted = condition("Accepted", False, "Invalid", why, generation)
    known = any(c.type == "Accepted" and c.message == why for c in old.conditions)
    status = msgspec.structs.replace(
        old,
        phase=old.phase if old.phase not in ("", "Created") else "Rejected",
        message=why,
        observed_generation=generation,
        conditions=merged(old.conditions, [accepted], now),
    )
    events = () if known else (JobNotice("Rejected", why, warning=True),)
    return Decision(status=status, events=events)


def _decide(view: View, master_image: str, token: str) -> Decision:
    """Decide about a valid job."""
    master, old = view.master, view.old
    if old.completion_time:
        return removal.finished(view)
    removing = removal.removing(view)
    if view.job.spec.suspend or (old.phase == "Suspended" and removing):
        return removal.suspended(view)
    left = view.time_left()
    if left is not None and left <= 0 and (master is None or not pods.finished(master)):
        return removal.too_late(view)
    if removal.time_away(view) > 0 or (old.phase == "Yielded" and removing):
        return removal.stays_away(view)
    return _start(view, master_image, token) if master is None else _goes_on(view, master)


def _goes_on(view: View, master: Manifest) -> Decision:
    """Decide about a job whose master has a pod."""
    if pods.finished(master):
        return _master_ended(view, master)
    if pods.leaving(master):
        forced = view.forced()
        again = None if forced else view.force_after(master)
        why = pods.words("The master's pod is being deleted", pods.disruption(master))
        return _restarting(view, f"{why}.", forced, again)
    missing = objects.missing_labels(view.job, master)
    if missing:
        message = f"The master's pod lost its label {', '.join(missing)} and cannot be found."
        view.report("MasterLost", f"{message} It restarts.", warning=True)
        return _restarting(view, message, (deletion(master),))
    return _runs(view, master)


def _master_ended(view: View, master: Manifest) -> Decision:
    end, before = pods.end_of_master(master), view.old.master
    short = end.lived < (QUICK if end.of_job else LONG)
    may_work = before.quick_ends < QUICK_ENDS if short else not end.of_job
    if end.final and not (end.reason == "Infrastructure" and may_work):
        return removal.complete(view, end)
    factor, more = before.memory_factor, ""
    if end.reason == "OOMKilled":  # read from the pod, so that a repeated decision is the same
        factor = min(MOST_MEMORY, pods.memory_factor(master) * MEMORY_GROWTH)
        more = f" with {factor:g} times the memory of the first one"
    view.report("MasterLost", f"{end.message} It restarts{more}.", warning=True)
    delete = () if pods.leaving(master) else (deletion(master),)
    remembered = msgspec.structs.replace(before, memory_factor=factor, failed=not end.of_job)
    return _restarting(view, end.message, delete, master=remembered)


def _restarting(
    view: View,
    why: str,
    delete: tuple[Deletion, ...] = (),
    again: float | None = None,
    **fields: Any,
) -> Decision:
    """Wait for the master's next start."""
    why = " ".join(filter(None, (why, view.held([view.master]) if view.master else "")))
    changed = [view.condition("MasterReady", False, "Lost", why)]
    return view.decision("Restarting", why, delete=delete, again=again, changed=changed, **fields)


def _name_taken(view: View, foreign: Manifest) -> Decision:
    """Handle a foreign pod with the master's name; delete one of an earlier job of this name."""
    earlier = pods.of_earlier(foreign, view.job)
    delete: tuple[Deletion, ...] = ()
    if earlier and not pods.leaving(foreign):
        delete = (deletion(foreign),)
    elif earlier and view.force_after(foreign) <= 0:
        delete = (deletion(foreign, grace=0),)
    message = f"Pod {pods.name(foreign)} does not belong to this job and must be deleted first."
    if not (view.old.message.startswith(message) or delete):
        view.report("NameTaken", message, warning=True)
    message = " ".join(filter(None, (message, view.held([foreign]))))
    return view.decision("Pending", message, delete=delete, again=FOREIGN_CHECK)


def _start(view: View, master_image: str, token: str) -> Decision:
    """Start a master, unless its name is taken or its predecessors' short lives delay that."""
    if view.foreign is not None:
        return _name_taken(view, view.foreign)
    job, before, suspended = view.job, view.old.master, view.is_true("Suspended")
    pause, lived = pods.delay(before.quick_ends), _lived(view)
    if before.starts and pause > lived:
        return _restarting(view, "The master restarts soon.", again=pause - lived)
    if suspended:
        view.report("Resumed", "spec.suspend is false: the job resumes.")
    fresh_start = suspended or view.old.phase == "Yielded" or not before.starts
    short = not fresh_start and lived < (LONG if before.failed else QUICK) + pause
    number = before.starts + 1
    view.events.append(_started(number))
    decision = view.decision(
        "Restarting" if before.starts else "Created",
        f"Started master {number} of the job.",
        master=MasterStatus(
            starts=number,
            last_start_time=times.written(view.now),
            quick_ends=before.quick_ends + 1 if short else 0,
            memory_factor=before.memory_factor,
        ),
        start_time=("" if suspended else view.old.start_time) or times.written(view.now),
        running_spec=view.running.record,
        changed=[
            view.condition("Suspended", False, "Resumed"),
            view.condition("MasterReady", False, "Starting"),
            *(
                [view.condition("Placed", False, "Waits")]
                if fresh_start and view.yields_after is not None
                else []
            ),
        ],
    )
    certificate, group = objects.certificate(job), objects.pod_group(job)
    secret = objects.secret(job, token)
    return replace(
        decision,
        ensure=(
            *objects.account(job),
            *([secret] if secret is not None else []),
            objects.service(job),
            *([group] if group is not None else []),
        ),
        certificate=None if certificate is None else Certificate(certificate, tls.hosts(job)),
        start=objects.master_pod(job, master_image, number, before.memory_factor),
    )


def _started(number: int) -> JobNotice:
    return JobNotice("MasterStarted", f"Started master {number} of the job.")


def _lived(view: View) -> float:
    """Return the seconds since the last master was started; `QUICK` if that is unknown or a clock was set back."""
    started = times.read(view.old.master.last_start_time)
    return QUICK if started is None or started > view.now else view.now - started


def _runs(view: View, master: Manifest) -> Decision:
    """Report the state of a job whose master lives; yield if another job waits ahead of it."""
    ready, job = pods.ready(master), view.job
    own = [master, *view.others]
    why = pods.obstacle(own, view.seen.noticed) or view.old.training.waits
    remembered = _remembered(view, master)
    silent = "" if ready or remembered else _silent(view, master)
    phase, message = "Pending", "The workers are starting." if ready else "The master is starting."
    if ready and job.spec.roles:
        phase, message = "Running", "The coordinator is running."
    elif ready and view.active:
        phase, message = "Running", f"{view.active} of {view.wanted} workers are running."
    elif silent or (view.old.master.starts > 1 and view.old.phase == "Restarting" and not ready):
        phase = "Restarting"
    if ready and not view.is_true("MasterReady"):
        view.report("MasterReady", "The master accepts connections.")
    changed = [
        view.condition("Suspended", False, "Resumed"),
        view.condition("MasterReady", False, _NOT_READY, silent)
        if silent
        else view.condition("MasterReady", ready, "Ready" if ready else "Starting"),
    ]
    again = NOTICE_CHECK if any(map(pods.is_preparing, own)) else None
    if view.yields_after is not None and not view.is_true("Placed"):
        if yielding.is_placed(view.job, view.others):
            changed.append(view.condition("Placed", True, "Placed"))
        else:
            patience = _patience(view, view.yields_after)
            again = patience if again is None else min(again, patience)
            if again == 0.0:
                return removal.yields(view, view.yields_after)
    if remembered:  # the server accepted it, but the response was lost
        view.events.insert(0, _started(remembered["master"].starts))
    decision = view.decision(
        phase,
        silent or why or message,
        changed=changed,
        again=again,
        running_spec=view.running.record,
        **remembered,
    )
    missing = () if view.seen.service is not None else (objects.service(view.job),)
    return replace(decision, ensure=missing)


def _silent(view: View, master: Manifest) -> str:
    """Return that the master, which was ready, no longer is: its machine may be lost. Empty while it starts."""
    before = next((c for c in view.old.conditions if c.type == "MasterReady"), None)
    if before is None or (before.status != "True" and before.reason != _NOT_READY):
        return ""
    machine = (master.get("spec") or {}).get("nodeName") or "its machine"
    message = f"The master's pod is no longer ready: it does not answer, or {machine} does not."
    if before.status == "True":
        view.report(_NOT_READY, message, warning=True)
    return message


def _patience(view: View, after: int) -> float:
    """Return the seconds until the job yields or checks again whether it should."""
    own = yielding.claim(view.job, view.old, view.others)
    assert own is not None
    left = yielding.time_left(own, view.seen.rivals, after, view.now)
    return float(after) if left is None else left


def _remembered(view: View, master: Manifest) -> Manifest:
    """Return the status fields for a master whose start was not recorded; empty if it was."""
    created = times.read(str(master["metadata"].get("creationTimestamp") or ""))
    before, number = view.old.master, pods.number_of_master(master)
    if created is None or number <= before.starts:
        return {}
    started = msgspec.structs.replace(
        before, starts=number, last_start_time=times.written(created), failed=False
    )
    return {"master": started, "start_time": view.old.start_time or started.last_start_time}
