"""ScalePlans: what each one requests, and its status while no master handles it. No I/O here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine.decisions import status_of
from dlrover.kubernetes.machine.nodes import SCALED
from dlrover.kubernetes.resources import names, times, validation
from dlrover.kubernetes.resources.types import ElasticJob, Manifest, ScalePlanSpec
from dlrover.spec.node import WORKER

TYPE_LABEL = "scale-type"
"""Label of a plan; ``auto``: the plan is not a user's and stays within its job's bounds."""
PENDING, SCALING, SUCCEEDED, FAILED = "Pending", "Scaling", "Succeeded", "Failed"
FINAL = (SUCCEEDED, FAILED, "NoEffect")
"""Phases of finished plans; the last one is from an earlier release."""
REASON_LIMIT = 400
"""Maximum characters of a plan's reason."""


# ---- what a plan requests


def wanted(spec: ScalePlanSpec, job: ElasticJob, now: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of pods that a plan requests, for each role that it changes.

    ``now`` has the wanted numbers without the plan. A plan that only replaces pods requests none.

    Raises:
        ConfigurationError: the request is impossible.
    """
    found: dict[str, int] = {}
    for role, replica in spec.replica_resource_specs.items():
        field = f"spec.replicaResourceSpecs.{role}.replicas"
        given = job.spec.replica_specs.get(role.lower())
        if given is None:
            has = ", ".join(job.spec.replica_specs)
            raise ConfigurationError(f"{field}: the job has no role {role}; it has {has}.")
        if replica.replicas is None:
            continue
        if role.lower() in SCALED:
            found[role.lower()] = replica.replicas
        elif replica.replicas != given.replicas:
            raise ConfigurationError(
                f"{field} is {replica.replicas}: accepted is {given.replicas}, the number that the job "
                f"has; only {' and '.join(SCALED)} change while a job runs."
            )
    for field, pods, sign in (
        ("createPods", spec.create_pods, 1),
        ("removePods", spec.remove_pods, -1),
    ):
        for pod in pods:
            role = pod.type.lower() or WORKER
            if role not in SCALED:
                raise ConfigurationError(
                    f"spec.{field} has a pod of type {pod.type}: accepted are {' and '.join(SCALED)}, the "
                    "roles that change while a job runs."
                )
            found[role] = found.get(role, now.get(role, 0)) + sign
    if not found and not replaces(spec):
        found = {WORKER: now.get(WORKER, 0)}
    return {role: _bounded(role, number, job) for role, number in found.items()}


def replaces(spec: ScalePlanSpec) -> bool:
    """Return whether a plan replaces pods."""
    return bool(
        spec.migrate_pods or any(one.resource for one in spec.replica_resource_specs.values())
    )


def _bounded(role: str, number: int, job: ElasticJob) -> int:
    """Return the number if the job's manifest accepts it."""
    given = job.spec.replica_specs.get(role)
    if given is None:
        raise ConfigurationError(
            f"The job has no role {role}; of its roles {' and '.join(SCALED)} can be scaled."
        )
    least = given.min_replicas or 1
    if number < least:
        raise ConfigurationError(
            f"The plan requests {counted(role, number)}: accepted are at least {least} "
            f"({'minReplicas' if given.min_replicas else 'spec.suspend stops a job'})."
        )
    return number


def counted(role: str, number: int) -> str:
    """Return a count as used in messages: ``2 workers``, ``1 server``."""
    return f"{number} {'worker' if role == WORKER else 'server'}{'' if number == 1 else 's'}"


def notes(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field of a plan that is set but has no effect."""
    for field in ("createPods", "removePods"):
        named = ("name", "id", "rankIndex", "service")
        if any(pod.get(one) for pod in spec.get(field) or () for one in named):
            yield (
                f"spec.{field}: only the number of its pods counts. The master names pods, and those with "
                "the highest ranks leave."
            )
        if any(pod.get("resource") for pod in spec.get(field) or ()):
            yield _no_effect(f"{field}.resource", "Resources are those of the template.")
    others = ("id", "type", "rankIndex", "service")
    if any(pod.get(one) for pod in spec.get("migratePods") or () for one in others):
        yield "spec.migratePods: only the name and the resource of its pods count."
    if spec.get("manualScaling"):
        yield _no_effect("manualScaling", "The label scale-type marks plans that are not a user's.")
    if spec.get("psHosts"):
        yield _no_effect("psHosts", "A worker finds the servers by the ranks of its world.")


def _no_effect(field: str, instead: str) -> str:
    return f"spec.{field} is accepted for compatibility and has no effect. {instead}"


# ---- to which job a plan belongs, and its status without a master


def owner_of(plan: Manifest) -> str | None:
    """Return the uid of the ElasticJob that owns a plan; None if it has no owner yet."""
    references = plan["metadata"].get("ownerReferences") or ()
    jobs = (one["uid"] for one in references if one.get("kind") == "ElasticJob")
    return next(jobs, None)


def belongs(plan: Manifest, job: Mapping[str, Any]) -> bool:
    """Return whether a plan belongs to the job with this metadata: by its owner or, without one, by its age.

    A plan older than the job was made for an earlier job of its name, or for none.
    """
    owner = owner_of(plan)
    if owner is not None:
        return bool(owner == job.get("uid"))
    made = times.read(str(plan["metadata"].get("creationTimestamp") or ""))
    submitted = times.read(str(job.get("creationTimestamp") or ""))
    return made is None or submitted is None or made >= submitted


def standing(plan: Manifest, job: Manifest | None) -> dict[str, str] | None:
    """Return the operator's status of a plan, given its ``job``; None if the operator must not write one."""
    phase = (plan.get("status") or {}).get("phase") or ""
    owner = (plan.get("spec") or {}).get("ownerJob") or ""
    spec = (job or {}).get("spec") or {}
    if phase in FINAL or spec.get("managedBy") not in (None, "", names.MANAGER):
        return None
    if job is not None and not belongs(plan, job["metadata"]):
        older = f"The plan is older than the ElasticJob {owner}: create the plan again."
        # A plan with an owner is deleted with its owner.
        return None if owner_of(plan) else {"phase": FAILED, "message": older}
    gone = f"There is no ElasticJob {owner} in this namespace; create the plan after its job."
    if job is not None and status_of(job).completion_time:
        return {"phase": FAILED, "message": f"The ElasticJob {owner} has ended."}
    if phase == SCALING:  # its master carries it out
        return {"phase": FAILED, "message": gone} if job is None else None
    message = f"The plan waits for the master of {owner}."
    if job is None:
        message = gone
    elif spec.get("suspend"):
        message = f"The ElasticJob {owner} is suspended."
    else:
        try:
            validation.parse(job)
        except ConfigurationError as error:  # its master cannot derive the numbers
            message = f"The plan waits until the manifest of {owner} is right: {error}"
    return {"phase": PENDING, "message": message}
