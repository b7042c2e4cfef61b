"""What the operator is told of a job, and what it decides: plain records, without a decision in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dlrover.kubernetes import times
from dlrover.kubernetes.types import Condition, ElasticJobStatus
from dlrover.kubernetes.yielding import Claim

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Observed:
    """What there is of a job. Pods and Service are those that carry the job's label."""

    job: Manifest
    pods: Sequence[Manifest] = ()
    service: Manifest | None = None
    rivals: Sequence[Claim] = ()
    """What other jobs claim that give way, as this one may."""


@dataclass(frozen=True)
class Options:
    """What the operator's own options say about jobs."""

    master_image: str = "dlrover:latest"


@dataclass(frozen=True)
class Event:
    """What is told to users, with the job."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Deletion:
    """An object to delete; only that of this uid."""

    kind: str
    name: str
    uid: str
    grace: int | None = None
    """Seconds to end; None: its own."""


@dataclass(frozen=True)
class Certificate:
    """A certificate to make: its key is random, so no decision holds it."""

    secret: Manifest
    """The Secret that is to hold it."""
    hosts: Sequence[str]
    """What it names."""


@dataclass(frozen=True)
class Decision:
    """What to do, in this order. Nothing of it is done again if it has been done."""

    ensure: tuple[Manifest, ...] = ()
    """Objects to create where they are missing."""
    certificate: Certificate | None = None
    """What to make a certificate for where there is none yet."""
    start: Manifest | None = None
    """The master's pod to create; if there is one already, the rest is for another time."""
    delete: tuple[Deletion, ...] = ()
    status: ElasticJobStatus | None = None
    """The job's status, but for ``training``; None: not ours to write."""
    events: tuple[Event, ...] = ()
    claim: Claim | None = None
    """What other jobs are to know of this one; None: nothing."""
    again: float | None = None
    """Seconds after which to decide again, though nothing changes."""


def status_of(manifest: Mapping[str, Any]) -> ElasticJobStatus:
    """The status in a manifest; an empty one if somebody wrote what is none, or meant an earlier job of its name.

    The API server takes a patch of a status for whatever has that name: it ignores its uid.
    """
    try:
        status = msgspec.convert(manifest.get("status") or {}, ElasticJobStatus)
    except msgspec.ValidationError:
        return ElasticJobStatus()
    uid = (manifest.get("metadata") or {}).get("uid", "")
    return ElasticJobStatus() if status.job_uid not in ("", uid) else status


def condition(
    kind: str, status: bool, reason: str, message: str = "", generation: int = 0
) -> Condition:
    """A condition, without the time of its last change."""
    return Condition(
        type=kind,
        status="True" if status else "False",
        reason=reason,
        message=message or f"{reason}.",
        observed_generation=generation,
    )


def merged(old: Sequence[Condition], changed: Sequence[Condition], now: float) -> list[Condition]:
    """``old`` with ``changed`` in it; the time of a change is that of the status, not of its reason."""
    result = {c.type: c for c in old}
    for new in changed:
        before = result.get(new.type)
        same = before is not None and before.status == new.status
        since = before.last_transition_time if before and same else times.written(now)
        result[new.type] = msgspec.structs.replace(new, last_transition_time=since)
    return list(result.values())
