"""The interpretation of pods: their role, whether they run, how they ended, and why they do not start."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlrover.errors import ExitCode
from dlrover.kubernetes.resources import commands, names, times
from dlrover.kubernetes.resources.types import ElasticJob, Manifest, ReplicaStatus

_DECISIVE = {
    ExitCode.USER_CODE: ("UserCode", "The training program failed"),
    ExitCode.USAGE: ("Usage", "An option, a file or a setting is invalid"),
    ExitCode.INTERNAL: ("Infrastructure", "The master ended before its job"),
    ExitCode.INFRASTRUCTURE: ("Infrastructure", "The infrastructure failed"),
    ExitCode.NO_PROGRESS: ("NoProgress", "Restarts no longer lead to new steps"),
    ExitCode.STOPPED: ("Stopped", "The job was stopped"),
}
_NO_PROGRAM = ("ContainerCannotRun", "StartError")
_STUCK = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError",
          "CreateContainerError", "ErrImageNeverPull", "RunContainerError", "CrashLoopBackOff")  # fmt: skip
_BEFORE_START = ("FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox")
"""Reasons of Events about a pod that has its machine and does not start there, which its status does not have."""
_TIMED_OUT = "Unable to attach or mount volumes"
"""What an Event says some minutes after those that say why."""
_SANDBOX = re.compile(r"\b[0-9a-f]{64}\b")
"""The id of a sandbox, which is another one at each attempt."""

QUICK = 60.0
"""Seconds below which a pod's life counts as short; repeated short lives delay the next pod ever longer."""
LONGEST_DELAY = 60.0
"""Maximum seconds of that delay."""
FORCE_AFTER = 60.0
"""Seconds beyond its grace period after which a node's pod on an unresponsive machine is deleted by force."""


@dataclass(frozen=True)
class End:
    """How a pod ended; ``final``: the job ended with it, and a restart would not help."""

    final: bool
    succeeded: bool
    reason: str
    message: str
    lived: float = 0.0
    """Seconds that it ran; 0 if unknown."""
    of_job: bool = True
    """False if a master ended although its job had not."""


def delay(quick_ends: int) -> float:
    """Return the seconds to wait before a pod starts after this many short-lived ones in a row in its place."""
    return 0.0 if quick_ends < 2 else min(LONGEST_DELAY, 2.0**quick_ends)


def name(pod: Manifest) -> str:
    """Return the pod's name."""
    return str(pod["metadata"]["name"])


def role(pod: Manifest) -> str:
    """Return the pod's role, such as ``worker``."""
    return str((pod["metadata"].get("labels") or {}).get(names.ROLE_LABEL, ""))


def phase(pod: Manifest) -> str:
    """Return ``Pending``, ``Running``, ``Succeeded``, ``Failed`` or ``Unknown``."""
    return str(_status(pod).get("phase") or "Pending")


def ended(pod: Manifest) -> bool:
    """Return whether all its containers have ended."""
    return phase(pod) in ("Succeeded", "Failed")


def finished(pod: Manifest) -> bool:
    """Return whether its main container has ended; containers beside it, as those of a service mesh, may run on."""
    return ended(pod) or bool(end_of_main(pod))


def end_of_main(pod: Manifest) -> Manifest:
    """Return how its main container ended; empty while it runs, or if unknown, as for an evicted pod."""
    name = commands.main(pod).get("name")
    return next((end for one, end in states(pod, "terminated") if name in (None, one)), {})


def leaving(pod: Manifest) -> bool:
    """Return whether it is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def held(pod: Manifest) -> str:
    """Return which finalizers keep a pod that has nothing else to wait for; empty if none do."""
    metadata = pod["metadata"]
    if not leaving(pod) or metadata.get("deletionGracePeriodSeconds") != 0:
        return ""
    found = ", ".join(metadata.get("finalizers") or ())
    return (
        f"Pod {name(pod)} is deleted but for its finalizers, which their controllers have to remove: {found}."
        if found
        else ""
    )


def force_after(pod: Manifest, now: float, after: float = FORCE_AFTER) -> float:
    """Return the seconds until a leaving pod is deleted by force, ``after`` seconds beyond its grace period.

    Force does not help against finalizers: for a pod that only they keep, the time does not pass.
    """
    if held(pod):
        return after
    due = times.read(pod["metadata"].get("deletionTimestamp") or "")
    return (now if due is None else due) + after - now


def ready(pod: Manifest) -> bool:
    """Return whether it runs, is ready, and is not being deleted."""
    is_ready = condition(pod, "Ready").get("status") == "True"
    return phase(pod) == "Running" and not leaving(pod) and is_ready


def condition(pod: Manifest, kind: str) -> Manifest:
    """Return the pod's condition of a type; empty if it has none."""
    conditions = _status(pod).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == kind), {})


def disruption(pod: Manifest) -> Manifest:
    """Return why the cluster ends a pod, such as a preemption or a drain; empty if it does not, or does not say so."""
    found = condition(pod, "DisruptionTarget")
    return found if found.get("status") == "True" else {}


def words(what: str, said: Manifest) -> str:
    """Return a statement with a condition's or a state's reason and message, without a full stop."""
    detail = str(said.get("message") or "").strip().rstrip(".")
    return ": ".join(str(part) for part in (what, said.get("reason"), detail) if part)


def states(
    pod: Manifest, kind: str, among: str = "containerStatuses"
) -> Iterator[tuple[str, Manifest]]:
    """Yield the containers in the state ``waiting`` or ``terminated``: name and details."""
    for container in _status(pod).get(among) or ():
        details = (container.get("state") or {}).get(kind)
        if details:
            yield container.get("name", ""), details


def waits(pod: Manifest) -> Iterator[Manifest]:
    """Yield why containers wait, in the order in which they start: the first ones prepare the pod."""
    for among in ("initContainerStatuses", "containerStatuses"):
        for _, details in states(pod, "waiting", among):
            yield details


def owned(pod: Manifest, uid: str) -> bool:
    """Return whether it belongs to the object with that uid."""
    return any(ref.get("uid") == uid for ref in pod["metadata"].get("ownerReferences") or ())


def of_earlier(pod: Manifest, job: ElasticJob) -> bool:
    """Return whether it belongs to an earlier ElasticJob of the job's name, deleted since: names are unique."""
    made, since = (one.get("creationTimestamp", "") for one in (pod["metadata"], job.metadata))
    return made <= since and any(
        ref.get("kind") == "ElasticJob"
        and str(ref.get("apiVersion")).startswith(f"{names.GROUP}/")
        and ref.get("name") == job.name
        and ref.get("uid") != job.uid
        for ref in pod["metadata"].get("ownerReferences") or ()
    )


def end_of_master(pod: Manifest) -> End:
    """Return how the master's pod ended: with the job's exit code, or from an external cause."""
    terminated = end_of_main(pod)
    said = str(terminated.get("message") or "").strip().rpartition("\n")[2]
    code = terminated.get("exitCode")
    if phase(pod) == "Succeeded" or code == 0:
        return End(final=True, succeeded=True, reason="Succeeded", message="All workers succeeded.")
    why = str(terminated.get("reason") or _status(pod).get("reason") or "")
    if why in _NO_PROGRAM or code == 127:
        what = f"The master's image has no command dlrover: {said or why}."
        return End(final=True, succeeded=False, reason="NoCommand", message=what)
    if why != "OOMKilled" and code in list(_DECISIVE):
        reason, what = _DECISIVE[ExitCode(code)]
        what = f"{what}: {said}" if said else f"{what}."
        return End(
            final=True,
            succeeded=False,
            reason=reason,
            message=what,
            lived=_lived(terminated),
            of_job=code != ExitCode.INTERNAL,
        )
    return End(final=False, succeeded=False, reason=why or "Lost", message=_fate(pod, code, why))


def exit_code_of(reasons: Iterable[str]) -> ExitCode:
    """Return the exit code of a job that failed for one of these reasons of `end_of_master`."""
    known = {why: code for code, (why, _) in _DECISIVE.items() if code != ExitCode.INTERNAL}
    return next((known[reason] for reason in reasons if reason in known), ExitCode.INFRASTRUCTURE)


def _lived(terminated: Manifest) -> float:
    began = times.read(str(terminated.get("startedAt") or ""))
    ended_at = times.read(str(terminated.get("finishedAt") or ""))
    return 0.0 if began is None or ended_at is None else ended_at - began


def _fate(pod: Manifest, code: int | None, why: str) -> str:
    if why == "OOMKilled":
        return "The master used more memory than its limit."
    of_pod = _status(pod).get("reason")
    if code is not None and code > ExitCode.SIGNAL_BASE and not of_pod:
        return f"The master was killed by signal {code - ExitCode.SIGNAL_BASE}."
    detail = str(_status(pod).get("message") or "").strip().rstrip(".")
    known = ": ".join(part for part in (of_pod or why, detail) if part)
    return f"The master's pod failed: {known or f'exit code {code}'}."


def memory_factor(pod: Manifest) -> float:
    """Return a pod's memory multiplier relative to its template; for a master, to the job's first master."""
    return _factor(pod, names.MEMORY_FACTOR)


def number_of_master(pod: Manifest) -> int:
    """Return which of its job's masters a pod is, from 1; 0 if it is of a release that did not say so."""
    text = (pod["metadata"].get("annotations") or {}).get(names.MASTER_NUMBER, "")
    return int(text) if text.isdecimal() else 0


def cpu_factor(pod: Manifest) -> float:
    """Return a pod's CPU multiplier relative to its template."""
    return _factor(pod, names.CPU_FACTOR)


def _factor(pod: Manifest, annotation: str) -> float:
    annotations = pod["metadata"].get("annotations") or {}
    try:
        return float(annotations.get(annotation, ""))
    except ValueError:
        return 1.0


def count(pods: Iterable[Manifest]) -> dict[str, ReplicaStatus]:
    """Count pods by role and phase, without the master and live pods that are being deleted."""
    counted: dict[str, dict[str, int]] = {}
    fields = {"Running": "active", "Succeeded": "succeeded", "Failed": "failed"}
    for pod in pods:
        if role(pod) in ("", names.MASTER_ROLE) or (leaving(pod) and not ended(pod)):
            continue
        of_role = counted.setdefault(role(pod), {})
        field = fields.get(phase(pod), "pending")
        of_role[field] = of_role.get(field, 0) + 1
    return {key: ReplicaStatus(**value) for key, value in sorted(counted.items())}


def obstacle(pods: Sequence[Manifest], noticed: Mapping[str, str]) -> str:
    """Return why the first waiting pod with a known reason does not start; empty if there is none.

    ``noticed``: by the uid of a pod, what `notices` found.
    """
    for pod in sorted(pods, key=name):
        if phase(pod) == "Pending" and not leaving(pod):
            why = _obstacle(pod)
            if not why and is_preparing(pod):
                why = _sentence(noticed.get(pod["metadata"]["uid"], ""))
            if why:
                return f"Pod {name(pod)} waits: {why}"
    return ""


def _obstacle(pod: Manifest) -> str:
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _sentence(str(scheduled.get("message") or scheduled.get("reason") or ""))
    for waiting in waits(pod):
        if waiting.get("reason") in _STUCK:
            detail = str(waiting.get("message") or "")
            return _sentence(": ".join(filter(None, (str(waiting["reason"]), detail))))
    return ""


def is_preparing(pod: Manifest) -> bool:
    """Return whether its machine prepares it, for instance mounts its volumes, and its status has no reason for waiting."""
    if phase(pod) != "Pending" or leaving(pod) or _obstacle(pod):
        return False
    kinds, among = ("running", "terminated"), ("initContainerStatuses", "containerStatuses")
    began = any(True for kind in kinds for one in among for _ in states(pod, kind, one))
    return not began and condition(pod, "PodScheduled").get("status") == "True"


def notices(events: Iterable[Manifest]) -> dict[str, str]:
    """Return, by the uid of a pod, why its machine cannot prepare it, as its last Events say."""
    found: dict[str, str] = {}
    for event in sorted(events, key=_last_time):
        uid = str(event["involvedObject"].get("uid", ""))
        reason = str(event.get("reason"))
        message = _SANDBOX.sub("…", " ".join(str(event.get("message")).split()))
        if reason not in _BEFORE_START:
            found.pop(uid, None)  # as "Pulling", which follows
        elif uid not in found or not message.startswith(_TIMED_OUT):
            found[uid] = f"{reason}: {message}"
    return found


def _last_time(event: Manifest) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _sentence(text: str) -> str:
    return text if not text or text.endswith(".") else f"{text}."


def _status(pod: Manifest) -> Manifest:
    return pod.get("status") or {}
