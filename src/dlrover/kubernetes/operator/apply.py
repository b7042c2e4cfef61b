"""The execution of a decision as calls to the API server, in an order that tolerates failure at any point."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dlrover.kubernetes.api import client as api
from dlrover.kubernetes.api.client import ApiError, Client, Resource
from dlrover.kubernetes.machine import podgroups
from dlrover.kubernetes.machine.decisions import (
    Certificate,
    Decision,
    Deletion,
    Event,
    condition,
    merged,
    status_of,
)
from dlrover.kubernetes.operator import certificates
from dlrover.kubernetes.resources import names, times
from dlrover.kubernetes.resources.types import ElasticJobStatus

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]
_MADE = (
    api.PODS,
    api.SERVICES,
    api.SECRETS,
    api.SERVICE_ACCOUNTS,
    api.ROLES,
    api.ROLE_BINDINGS,
    api.EVENTS,
)
_RESOURCES = {resource.kind: resource for resource in _MADE}
_POD_GROUPS = {
    f"{group}/{version}": Resource(group, version, "podgroups", "PodGroup")
    for group, version in podgroups.VERSIONS.values()
}


@dataclass(frozen=True)
class Result:
    """The outcome of carrying out a decision."""

    job: Manifest | None = None
    """The job as now stored by the server, if its status was written."""
    stale: bool = False
    """True if the server's state is newer than the decision's input: decide again soon."""
    taken: bool = False
    """True if a foreign object has a name that the job needs."""


async def carry_out(client: Client, jobs: Resource, job: Manifest, decision: Decision) -> Result:
    """Carry out a decision.

    Raises:
        InfrastructureError: a call failed. A permanent refusal is also reported in the job's status.
    """
    namespace = job["metadata"]["namespace"]
    try:
        for made in decision.ensure:
            await _ensure(client, made)
        if decision.certificate is not None:
            await _ensure_certificate(client, decision.certificate)
        if decision.start is not None and not await _create(client, decision.start):
            return Result(stale=True)
    except _TakenError as error:
        await _tell_obstacle(client, jobs, job, "NameTaken", str(error))
        return Result(taken=True)
    except ApiError as error:
        if _is_for_good(error):
            message = f"The API server refuses what the job needs: {error.message}"
            hopeless = error.status in (400, 422)
            await _tell_obstacle(client, jobs, job, "Refused", message, hopeless=hopeless)
        raise
    # Events precede the irreversible actions: reporting one twice is better than losing it.
    for event in decision.events:
        await tell(client, job, event)
    for gone in decision.delete:
        await _delete(client, jobs, namespace, gone)
    written = None
    if decision.status is not None:
        written = await _write_status(client, jobs, job, decision.status)
    return Result(job=written)


def _is_for_good(error: ApiError) -> bool:
    """Return whether the refusal is permanent. 404 is not: the namespace is being deleted."""
    gone = error.status == 404 and error.reason != "NoPodGroup"
    return not error.retriable and not gone


def status_patch(old: Mapping[str, Any] | None, status: ElasticJobStatus) -> dict[str, Any] | None:
    """Return the merge patch from ``old`` to ``status``, without ``training``; None if they are equal."""
    wanted = _set(msgspec.to_builtins(status))
    wanted.pop("training", None)
    known = {key: value for key, value in (old or {}).items() if key != "training"}
    return _difference(known, wanted) or None


def _set(value: Any) -> Any:
    """Return a value without its empty fields; unset fields are not written."""
    if isinstance(value, dict):
        inner = {key: _set(child) for key, child in value.items()}
        return {key: child for key, child in inner.items() if child not in ("", [], {})}
    return [_set(child) for child in value] if isinstance(value, list) else value


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = _difference(before, value)
            patch.update({key: inner} if inner else {})
        elif value != before:
            patch[key] = value
    return patch


async def tell(
    client: Client, job: Manifest, event: Event, component: str = "dlrover-operator"
) -> None:
    """Write an Event about a job, or count a repeated one; a failure is only logged."""
    metadata = job["metadata"]
    logger.info("Job %s/%s: %s", metadata["namespace"], metadata["name"], event.message)
    about = f"{metadata.get('uid')} {event.reason} {event.message}"
    digest = hashlib.sha256(about.encode()).hexdigest()[:16]
    now = times.written(time.time())
    reference = {
        "apiVersion": names.API_VERSION,
        "kind": "ElasticJob",
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "uid": metadata.get("uid", ""),
        "resourceVersion": metadata.get("resourceVersion", ""),
    }
    name = f"{metadata['name']}.{digest}"
    made = {
        "kind": "Event",
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "involvedObject": reference,
        "reason": event.reason,
        "message": event.message,
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": component},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    try:
        if not await _create(client, made):
            before = await client.get(api.EVENTS, metadata["namespace"], name)
            patch = {"count": int(before.get("count") or 1) + 1, "lastTimestamp": now}
            await client.patch(api.EVENTS, metadata["namespace"], name, patch)
    except ApiError as error:
        logger.warning("An event of job %s is not written: %s", metadata["name"], error)


async def _create(client: Client, made: Manifest) -> bool:
    """Create an object; return False if one of its name exists."""
    try:
        resource = _POD_GROUPS.get(made.get("apiVersion", "")) or _RESOURCES[made["kind"]]
        await client.create(resource, made)
    except ApiError as error:
        if error.status == 409 and error.reason == "AlreadyExists":
            return False
        if error.status == 404 and made["kind"] == "PodGroup":
            message = (
                f"The cluster has no PodGroup of {made['apiVersion']}, which spec.gang.by needs."
            )
            raise ApiError(error.status, "NoPodGroup", message) from error
        raise
    return True


async def _ensure(client: Client, made: Manifest) -> None:
    """Create an object if missing. Update an existing Role, whose rules may be from an earlier release."""
    if await _create(client, made):
        return
    metadata = made["metadata"]
    if made["kind"] == "Role":
        patch = {"rules": made["rules"]}
        await client.patch(api.ROLES, metadata["namespace"], metadata["name"], patch)
    elif made["kind"] == "Service":  # the only object whose name is not unique to each job
        found = await client.get(api.SERVICES, metadata["namespace"], metadata["name"])
        if not _of_jobs_of_this_name(found, metadata["ownerReferences"][0]):
            raise _TakenError(
                f"The Service {metadata['name']} is not this job's: it has to go first."
            )


def _of_jobs_of_this_name(found: Manifest, owner: Manifest) -> bool:
    """Return whether an object belongs to this job or an earlier one of its name, usable until deleted."""
    references = found["metadata"].get("ownerReferences") or ()
    return any((one["kind"], one["name"]) == (owner["kind"], owner["name"]) for one in references)


class _TakenError(Exception):
    """A foreign object has a name that the job needs."""


async def _ensure_certificate(client: Client, wanted: Certificate) -> None:
    """Create a certificate if missing. The operator cannot read Secrets, so it must make one to find out."""
    content = await asyncio.to_thread(certificates.make, wanted.hosts)
    await _create(client, {**wanted.secret, "stringData": content})


async def _delete(client: Client, jobs: Resource, namespace: str, gone: Deletion) -> None:
    resource = jobs if gone.kind == "ElasticJob" else _RESOURCES[gone.kind]
    await client.delete(resource, namespace, gone.name, uid=gone.uid, grace=gone.grace)


async def _write_status(
    client: Client, jobs: Resource, job: Manifest, status: ElasticJobStatus
) -> Manifest | None:
    metadata = job["metadata"]
    uid = metadata.get("uid", "")
    patch = status_patch(job.get("status"), msgspec.structs.replace(status, job_uid=uid))
    if patch is None:
        return None
    if (job.get("status") or {}).get("jobUid") not in (None, uid):
        patch["training"] = None  # belongs to an earlier job
    patch["jobUid"] = uid  # always, because another job may have the name by now
    try:
        return await client.patch(
            jobs, metadata["namespace"], metadata["name"], {"status": patch}, subresource="status"
        )
    except ApiError as error:
        if error.status == 404:
            return None
        raise


async def _tell_obstacle(
    client: Client,
    jobs: Resource,
    job: Manifest,
    reason: str,
    message: str,
    *,
    hopeless: bool = False,
) -> None:
    """Report in the job's status why it has no master. ``hopeless``: the manifest must change first."""
    old = status_of(job)
    generation = job["metadata"].get("generation", 0)
    obstacle = condition("MasterReady", False, reason, message, generation)
    told = any(c.type == "MasterReady" and c.message == message for c in old.conditions)
    waits = "Rejected" if hopeless else "Pending"
    status = msgspec.structs.replace(
        old,
        phase=old.phase if old.running_spec else waits,
        message=message,
        conditions=merged(old.conditions, [obstacle], time.time()),
    )
    await _write_status(client, jobs, job, status)
    if not told:
        await tell(client, job, Event(reason, message, warning=True))
