"""Decisions that remove a job's pods: it has ended, is suspended, or yields to another job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dlrover.kubernetes.machine import pods, yielding
from dlrover.kubernetes.machine.decisions import Decision, Deletion, JobNotice
from dlrover.kubernetes.machine.view import View, deletion
from dlrover.kubernetes.resources import commands, times
from dlrover.kubernetes.resources.types import Condition, Manifest

TOO_LATE = "DeadlineExceeded"
"""Failure reason of a job that exceeded its active deadline."""


def finished(view: View) -> Decision:
    """Clean up after a job that has ended."""
    ended_at = times.read(view.old.completion_time) or view.now
    after = view.job.spec.ttl_seconds_after_finished
    if after is not None and view.now >= ended_at + after:
        gone = Deletion("ElasticJob", view.job.name, view.job.uid)
        event = JobNotice("Deleted", f"The job ended {after} s ago (ttlSecondsAfterFinished).")
        return Decision(delete=(gone,), events=(event,))
    again = None if after is None else ended_at + after - view.now
    return view.decision(view.old.phase, view.old.message, delete=_clean(view), again=again)


def complete(view: View, end: pods.End) -> Decision:
    """Record the job's end."""
    phase = "Succeeded" if end.succeeded else "Failed"
    view.report(phase, end.message, warning=not end.succeeded)
    after = view.job.spec.ttl_seconds_after_finished
    return view.decision(
        phase,
        end.message,
        delete=_clean(view),
        again=None if after is None else float(after),
        completion_time=times.written(view.now),
        changed=[
            view.condition(phase, True, end.reason, end.message),
            *([view.condition("Complete", True, end.reason)] if end.succeeded else []),
            view.condition("MasterReady", False, "Ended"),
        ],
    )


def too_late(view: View) -> Decision:
    """Fail a job that exceeded its active deadline."""
    seconds = view.job.spec.active_deadline_seconds
    message = f"The job was active for {seconds} s (spec.activeDeadlineSeconds)."
    end = pods.End(final=True, succeeded=False, reason=TOO_LATE, message=message)
    return replace(complete(view, end), delete=_stopped(view))


def _stopped(view: View) -> tuple[Deletion, ...]:
    """Return the pods to delete for a stopped job, the master first: it would replace its workers."""
    running = [pod for pod in view.others if not pods.ended(pod)]
    master = view.master
    if master is not None and not (pods.ended(master) or pods.leaving(master)):
        running = [master]
    return _deletions(running)


def _clean(view: View) -> tuple[Deletion, ...]:
    """Return the pods that the job's policy deletes after its end."""
    if any(c.type == "Failed" and c.reason == TOO_LATE for c in view.old.conditions):
        stopped = _stopped(view)
        if stopped:
            return stopped
    master = [] if view.master is None else [view.master]
    match view.job.spec.clean_pod_policy:
        case "All":
            return _deletions([*view.others, *master])
        case "Running":
            return _deletions([pod for pod in [*view.others, *master] if not pods.ended(pod)])
        case "None":
            return ()


def _deletions(found: Sequence[Any]) -> tuple[Deletion, ...]:
    return tuple(deletion(pod) for pod in found if not pods.leaving(pod))


def removing(view: View) -> bool:
    """Return whether pods remain to be removed or have just gone; no new master may find them."""
    return bool(view.old.running_spec or (view.master is None and view.others))


def suspended(view: View) -> Decision:
    """Remove the pods of a suspended job."""
    left = len(view.others) + (view.master is not None)
    ending = "1 pod is ending." if left == 1 else f"{left} pods are ending."
    message = ending if left else "The job is suspended and has no pods."
    if view.old.phase != "Suspended":
        view.report("Suspended", "spec.suspend is true: the job's pods are removed.")
    held = view.held(_going(view))
    message = " ".join(filter(None, (message, held)))
    changed = [
        view.condition("Suspended", not left, "Ending" if left else "Suspended", message),
        view.condition("MasterReady", False, "Suspended"),
    ]
    return _without_pods(view, "Suspended", message, changed)


def time_away(view: View) -> float:
    """Return the seconds for which the job still leaves its place to another one."""
    last = times.read(view.old.last_yield_time)
    if view.old.phase != "Yielded" or view.yields_after is None or last is None:
        return 0.0
    if last > view.now:
        return 0.0  # a clock was set back
    return last + view.yields_after - view.now


def yields(view: View, after: int) -> Decision:
    """Release the pods to a job that waits ahead of this one."""
    least = commands.fewest_nodes(view.job)
    message = (
        f"{yielding.placed(view.others)} of at least {least} nodes were placed while another job "
        f"waits: the job releases its pods and requests them again in {after} s."
    )
    view.report("Yielded", message, warning=True)
    number, now = view.old.yields + 1, times.written(view.now)
    return _yielded(view, message, float(after), yields=number, last_yield_time=now)


def stays_away(view: View) -> Decision:
    """Keep a job that has yielded without pods."""
    return _yielded(view, view.old.message, max(0.0, time_away(view)) or None)


def _yielded(view: View, message: str, again: float | None, **fields: Any) -> Decision:
    changed = [view.condition("MasterReady", False, "Yielded", view.held(_going(view)))]
    return _without_pods(view, "Yielded", message, changed, again, **fields)


def _going(view: View) -> Sequence[Manifest]:
    """Return the pods to remove next: the master first, because it would replace its workers."""
    return [view.master] if view.master is not None else view.others


def _without_pods(
    view: View,
    phase: str,
    message: str,
    changed: Sequence[Condition],
    again: float | None = None,
    **fields: Any,
) -> Decision:
    """Remove the job's pods. The record of their spec is kept until none is left."""
    left = view.others or view.master is not None
    going = _going(view)
    running = [pod for pod in going if not pods.ended(pod)]
    again = min(map(view.force_after, running), default=again)
    forced = view.forced() if view.master is not None else view.forced_nodes()
    return view.decision(
        phase,
        message,
        delete=(*_deletions(going), *forced),
        again=None if forced else again,
        changed=changed,
        running_spec=view.running.record if left else "",
        **fields,
    )
