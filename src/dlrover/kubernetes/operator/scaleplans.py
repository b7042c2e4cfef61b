"""ScalePlans: what each one requests, and the operator's reports on those that no master handles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.kubernetes.api.client import ApiError, Client, Resource
from dlrover.kubernetes.api.informer import Informer
from dlrover.kubernetes.machine.decisions import status_of
from dlrover.kubernetes.machine.nodes import SCALED
from dlrover.kubernetes.operator.workqueue import WorkQueue
from dlrover.kubernetes.resources import names, times, validation
from dlrover.kubernetes.resources.types import ElasticJob, ScalePlanSpec
from dlrover.spec.roles import WORKER

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]
SCALE_PLANS = Resource(names.GROUP, names.VERSION, "scaleplans", "ScalePlan")
TYPE_LABEL = "scale-type"
"""Label of a plan; ``auto``: the plan is not a user's and stays within its job's bounds."""
PENDING, SCALING, SUCCEEDED, FAILED = "Pending", "Scaling", "Succeeded", "Failed"
FINAL = (SUCCEEDED, FAILED, "NoEffect")
"""Phases of finished plans; the last one is from an earlier release."""
REASON_LIMIT = 400
"""Maximum characters of a plan's reason."""
RETRY = 5.0
"""Seconds before a plan is processed again after a failed write."""


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
            f"The plan asks for {counted(role, number)}: accepted are at least {least} "
            f"({'minReplicas' if given.min_replicas else 'spec.suspend stops a job'})."
        )
    return number


def counted(role: str, number: int) -> str:
    """Return a count as used in messages: ``2 workers``, ``1 server``."""
    return f"{number} {'worker' if role == WORKER else 'server'}{'' if number == 1 else 's'}"


def notes(spec: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each field of a plan that is set but has no effect."""
    return list(_notes(spec))


def _notes(spec: Mapping[str, Any]) -> Iterator[str]:
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
        yield _no_effect("manualScaling", "The label scale-type says whose plan it is.")
    if spec.get("psHosts"):
        yield _no_effect("psHosts", "A worker finds the servers by the ranks of its world.")


def _no_effect(field: str, instead: str) -> str:
    return f"spec.{field} is accepted for compatibility and has no effect. {instead}"


# ---- the operator's part


class ScalePlans:
    """Reports, for the plans of one or all namespaces, what their jobs' masters cannot report."""

    def __init__(
        self, client: Client, namespace: str | None, jobs: Callable[[str], Manifest | None]
    ) -> None:
        """Prepare; ``jobs`` returns a job by its key."""
        self._client = client
        self._jobs = jobs
        self._queue = WorkQueue()
        self._plans = Informer(client, SCALE_PLANS, namespace, "", self._queue.add)

    def job_changed(self, key: str) -> None:
        """Process the plans of an added, changed or deleted job again; their owner may have changed."""
        namespace, _, name = key.partition("/")
        for plan, content in self._plans.cache.items():
            if plan.startswith(f"{namespace}/") and content["spec"].get("ownerJob") == name:
                self._queue.add(plan)

    async def run(self) -> None:
        """Work until cancelled."""
        following = asyncio.create_task(self._plans.run())
        try:
            while True:
                key = await self._queue.get()
                try:
                    await self._tell(key)
                except InfrastructureError as error:
                    logger.info("ScalePlan %s: %s", key, error)
                    self._queue.add_after(key, RETRY)
                finally:
                    self._queue.done(key)
        finally:
            following.cancel()
            self._queue.close()

    async def _tell(self, key: str) -> None:
        plan = self._plans.cache.get(key)
        if plan is None:
            return
        namespace, _, name = key.partition("/")
        owner = (plan.get("spec") or {}).get("ownerJob") or ""
        job = self._jobs(f"{namespace}/{owner}")
        if job is not None and owner_of(plan) is None and belongs(plan, job["metadata"]):
            await self._own(plan, job)
            return  # the queue returns it after this change
        before = plan.get("status") or {}
        status = standing(plan, job)
        if status is None or status.items() <= before.items():
            return
        # Only if no other writer, such as the master, was faster; its write queues the plan again.
        version = plan["metadata"]["resourceVersion"]
        patch = {"metadata": {"resourceVersion": version}, "status": status}
        try:
            await self._client.patch(SCALE_PLANS, namespace, name, patch, "status")
        except ApiError as error:
            if error.status != 404:
                raise

    async def _own(self, plan: Manifest, job: Manifest) -> None:
        """Set the plan's owner, so that it is deleted with its job and never scales a later namesake."""
        metadata = plan["metadata"]
        owner = {
            "apiVersion": names.API_VERSION,
            "kind": "ElasticJob",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
            "blockOwnerDeletion": False,
        }
        references = [*(metadata.get("ownerReferences") or ()), owner]
        patch = {"resourceVersion": metadata["resourceVersion"], "ownerReferences": references}
        try:
            await self._client.patch(
                SCALE_PLANS, metadata["namespace"], metadata["name"], {"metadata": patch}
            )
        except ApiError as error:
            if error.status != 404:
                raise


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
        older = f"The plan is older than the ElasticJob {owner}: it was not made for it. Create it again."
        # A plan with an owner is deleted with its owner.
        return None if owner_of(plan) else {"phase": FAILED, "message": older}
    gone = f"There is no ElasticJob {owner} in this namespace; create the plan after its job."
    if job is not None and status_of(job).completion_time:
        return {"phase": FAILED, "message": f"The ElasticJob {owner} has ended."}
    if phase == SCALING:  # its master carries it out
        return {"phase": FAILED, "message": gone} if job is None else None
    message = f"The master of {owner} takes it up."
    if job is None:
        message = gone
    elif spec.get("suspend"):
        message = f"The ElasticJob {owner} is suspended."
    else:
        try:
            validation.parse(job)
        except ConfigurationError as error:  # its master cannot tell by what numbers to go
            message = f"The plan waits until the manifest of {owner} is right: {error}"
    return {"phase": PENDING, "message": message}
