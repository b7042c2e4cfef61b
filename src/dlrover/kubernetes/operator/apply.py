"""The execution of a decision as calls to the API server, in an order that tolerates failure at any point."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from dlrover.kubernetes.api import client as api, elasticjobs
from dlrover.kubernetes.api.client import ApiError, Client, Resource
from dlrover.kubernetes.machine import podgroups
from dlrover.kubernetes.machine.decisions import (
    Certificate,
    Decision,
    JobNotice,
    condition,
    merged,
    status_of,
)
from dlrover.kubernetes.operator import certificates
from dlrover.kubernetes.resources.types import Manifest

_RESOURCES = {
    resource.kind: resource
    for resource in (
        api.ELASTIC_JOBS,
        api.PODS,
        api.SERVICES,
        api.SECRETS,
        api.SERVICE_ACCOUNTS,
        api.ROLES,
        api.ROLE_BINDINGS,
    )
}
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


async def carry_out(client: Client, job: Manifest, decision: Decision) -> Result:
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
        await _report_obstacle(client, job, "NameTaken", str(error))
        return Result(taken=True)
    except ApiError as error:
        if _is_for_good(error):
            message = f"The API server refused an object of the job: {error.message}"
            hopeless = error.status in (400, 422)
            await _report_obstacle(client, job, "Refused", message, hopeless=hopeless)
        raise
    # Events precede the irreversible actions: reporting one twice is better than losing it.
    for event in decision.events:
        await elasticjobs.record_event(client, job["metadata"], event)
    for gone in decision.delete:
        kind = _RESOURCES[gone.kind]
        await client.delete(kind, namespace, gone.name, uid=gone.uid, grace=gone.grace)
    if decision.status is None:
        return Result()
    return Result(job=await elasticjobs.write_status(client, job, decision.status))


def _is_for_good(error: ApiError) -> bool:
    """Return whether the refusal is permanent. 404 is not: the namespace is being deleted."""
    gone = error.status == 404 and error.reason != "NoPodGroup"
    return not error.retriable and not gone


async def _create(client: Client, made: Manifest) -> bool:
    """Create an object; return False if one of its name exists."""
    resource = _POD_GROUPS.get(made.get("apiVersion", "")) or _RESOURCES[made["kind"]]
    try:
        return await client.ensure(resource, made)
    except ApiError as error:
        if error.status == 404 and made["kind"] == "PodGroup":
            message = (
                f"The cluster has no PodGroup of {made['apiVersion']}, which spec.gang.by needs."
            )
            raise ApiError(error.status, "NoPodGroup", message) from error
        raise


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
                f"Service {metadata['name']} does not belong to this job and must be deleted first."
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


async def _report_obstacle(
    client: Client,
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
    known = any(c.type == "MasterReady" and c.message == message for c in old.conditions)
    waits = "Rejected" if hopeless else "Pending"
    status = msgspec.structs.replace(
        old,
        phase=old.phase if old.running_spec else waits,
        message=message,
        conditions=merged(old.conditions, [obstacle], client.server_time()),
    )
    await elasticjobs.write_status(client, job, status)
    if not known:
        event = JobNotice(reason, message, warning=True)
        await elasticjobs.record_event(client, job["metadata"], event)
