"""Plain records of what the operator observes about a job and what it decides, without decision logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dlrover._util import decoding
from dlrover.kubernetes.machine.yielding import Claim
from dlrover.kubernetes.resources import times
from dlrover.kubernetes.resources.types import Condition, ElasticJobStatus, Manifest


@dataclass(frozen=True)
class Observed:
    """The observed state of a job; its pods and Service are those with the job's label."""

    job: Manifest
    pods: Sequence[Manifest] = ()
    service: Manifest | None = None
    rivals: Sequence[Claim] = ()
    """Claims of other jobs that may yield, as this one may."""
    noticed: Mapping[str, str] = field(default_factory=dict)
    """By the uid of a pod, why its machine cannot prepare it."""
    parent: Manifest | None = None
    """The job of several roles to which this job belongs, if there is one."""


@dataclass(frozen=True)
class JobNotice:
    """A notice to users, attached to the job."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Deletion:
    """An object to delete, only if it has this uid."""

    kind: str
    name: str
    uid: str
    grace: int | None = None
    """Seconds to end; None for the object's own grace period."""


@dataclass(frozen=True)
class Certificate:
    """A certificate to make; its key is random, so no decision contains it."""

    secret: Manifest
    """The Secret to hold it."""
    hosts: Sequence[str]
    """The hosts that it names."""


@dataclass(frozen=True)
class Decision:
    """Actions for `apply.carry_out`, safe to repeat."""

    ensure: tuple[Manifest, ...] = ()
    """Objects to create if missing."""
    certificate: Certificate | None = None
    """Certificate to make if there is none yet."""
    start: Manifest | None = None
    """The master's pod to create; if one already exists, the remaining actions are skipped."""
    delete: tuple[Deletion, ...] = ()
    status: ElasticJobStatus | None = None
    """The job's status without ``training``; None if the status is not the operator's to write."""
    events: tuple[JobNotice, ...] = ()
    claim: Claim | None = None
    """This job's claim as other jobs see it; None if it has none."""
    again: float | None = None
    """Seconds after which to decide again even without a change."""


def status_of(manifest: Mapping[str, Any]) -> ElasticJobStatus:
    """Return a manifest's status; an empty one if it is invalid or belongs to an earlier job of this name.

    The API server ignores the uid in a status patch: the patch reaches any job with that name.
    """
    try:
        status = decoding.convert(manifest.get("status") or {}, ElasticJobStatus)
    except msgspec.ValidationError:
        return ElasticJobStatus()
    uid = (manifest.get("metadata") or {}).get("uid", "")
    return ElasticJobStatus() if status.job_uid not in ("", uid) else status


def condition(
    kind: str, status: bool, reason: str, message: str = "", generation: int = 0
) -> Condition:
    """Return a condition without its transition time."""
    return Condition(
        type=kind,
        status="True" if status else "False",
        reason=reason,
        message=message or f"{reason}.",
        observed_generation=generation,
    )


def merged(old: Sequence[Condition], changed: Sequence[Condition], now: float) -> list[Condition]:
    """Return ``old`` updated with ``changed``; a new status, but not a new reason, sets the time."""
    result = {c.type: c for c in old}
    for new in changed:
        before = result.get(new.type)
        same = before is not None and before.status == new.status
        since = before.last_transition_time if before and same else times.written(now)
        result[new.type] = msgspec.structs.replace(new, last_transition_time=since)
    return list(result.values())
