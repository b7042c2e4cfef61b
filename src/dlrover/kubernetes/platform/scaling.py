"""The master's part of scaling: it follows its ElasticJob's replicas and carries out its ScalePlans.

A user's number is in the manifest (``spec.replicaSpecs.ROLE.replicas``, for workers and servers). A user's
ScalePlan is written there, too, so that a master that starts without a journal finds it. Other plans leave
the manifest unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from dlrover._util import decoding, tasks
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.kubernetes.api import elasticjobs
from dlrover.kubernetes.api.client import ELASTIC_JOBS, SCALE_PLANS, ApiError, Client
from dlrover.kubernetes.api.informer import Informer
from dlrover.kubernetes.machine import nodes, objects, scaleplans
from dlrover.kubernetes.machine.decisions import JobNotice
from dlrover.kubernetes.machine.scaleplans import FAILED, FINAL, PENDING, SCALING, SUCCEEDED
from dlrover.kubernetes.platform import migration
from dlrover.kubernetes.platform.migration import PodMigration
from dlrover.kubernetes.resources import names, times, validation
from dlrover.kubernetes.resources.types import ElasticJob, Manifest, ScalePlan, ScalePlanSpec
from dlrover.platform import base
from dlrover.spec.node import SERVER, WORKER

logger = logging.getLogger(__name__)

POLL = 1.0
"""Seconds between checks of a plan's progress."""
PLAN_TIMEOUT = 600.0
"""Seconds allowed for the job to reach the nodes that a plan requests."""
_FIELDS = {WORKER: "replicas", SERVER: "servers"}
"""The fields of a plan's status with the number of each role."""


class Scaler:
    """Scales one job according to its manifest and its plans. Use it on one event loop."""

    def __init__(
        self,
        client: Client,
        job: ElasticJob,
        calls: base.PlatformJob,
        resize: Callable[[str, int], None],
    ) -> None:
        """Prepare; `run` starts the work.

        Args:
            client: Client of the API server.
            job: The job as the master started with it.
            calls: The calls to the master's job.
            resize: Called with a role and its number before the nodes are made.
        """
        self._client, self._job = client, job
        self._key = f"{job.namespace}/{job.name}"
        self._calls, self._size, self._resize = calls, calls.size, resize
        self._changed = asyncio.Event()
        self._roles = [role for role in nodes.SCALED if role in job.spec.replica_specs]
        # by role: the last number seen in the manifest, and the number of recorded plans
        self._seen: dict[str, int] = {}
        self._plans_seen: dict[str, int] = {}
        # by uid: the last status of a plan, and the names of plans with unwritten status
        self._statuses: dict[str, Manifest] = {}
        self._unwritten: dict[str, str] = {}
        # by role: the master's own plan that has no record yet
        self._unrecorded: dict[str, Manifest] = {}
        # uid and replacements of the plan in progress
        self._migration: tuple[str, PodMigration] | None = None
        # by role: a number not yet written to the manifest, and the manifest that it is for
        self._unwritten_replicas: dict[str, tuple[int, Manifest]] = {}
        self._manifests = Informer(
            client,
            ELASTIC_JOBS,
            job.namespace,
            "",
            self._wake,
            fields=f"metadata.name={job.name}",
        )
        self._plans = Informer(client, SCALE_PLANS, job.namespace, "", self._wake)

    async def run(self) -> None:
        """Work until cancelled."""
        following = [
            asyncio.create_task(informer.run()) for informer in (self._manifests, self._plans)
        ]
        try:
            await self._manifests.synced.wait()
            self._begin()
            while True:
                self._changed.clear()
                await self._look()
                await tasks.signalled(self._changed, POLL)
        finally:
            for task in following:
                task.cancel()

    def _wake(self, _key: str) -> None:
        self._changed.set()

    def _begin(self) -> None:
        """Continue where the last master was, with or without its journal."""
        for role in self._roles:
            size = self._size(role)
            self._seen[role], self._plans_seen[role] = size.requested, size.plans
            self._resize(role, size.wanted)
            if size.wanted > size.requested and not size.plans:
                # Pods that were leaving when the journal was lost are not wanted.
                self._seen[role] = -1

    async def _look(self) -> None:
        try:
            for uid, name in list(self._unwritten.items()):
                await self._write(uid, name)
            await self._write_replicas()
            for role in self._roles:
                await self._follow_manifest(role)
                self._note_plan(role)
            await self._record_plans()
            await self._carry_out_plans()
        except InfrastructureError as error:
            logger.info("Scaling is retried: %s", error)

    # ---- the manifest

    async def _follow_manifest(self, role: str) -> None:
        job = self._current()
        spec = job.spec.replica_specs.get(role) if job is not None else None
        if spec is None or spec.replicas == self._seen[role]:
            return
        number, size = spec.replicas, self._size(role)
        self._seen[role] = number
        if number == size.requested and (size.plans or number == size.wanted):
            return  # written by a plan
        reason = f"spec.replicaSpecs.{role}.replicas is {number}"
        sentence, refused = self._scale(role, number, reason, "user")
        if refused:
            sentence = f"{reason}; the job stays unchanged. {sentence}"
        await self._event("ScaleRefused" if refused else "Scaled", sentence, warning=refused)

    def _current(self) -> ElasticJob | None:
        """Return the job from its current manifest; None if that is invalid or gone."""
        manifest = self._manifests.cache.get(self._key)
        if manifest is None or manifest["metadata"].get("uid") != self._job.uid:
            return None
        try:
            return validation.parse(manifest)
        except ConfigurationError:
            return None  # the operator reports it

    def _scale(
        self,
        role: str,
        number: int,
        reason: str,
        source: Literal["user", "plan"],
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[str, bool]:
        """Request a number of a role's nodes; return the outcome and whether it is a refusal."""
        reply = self._calls.ask_scale(number, reason, source, role, factors)
        self._resize(role, self._size(role).wanted)
        return reply.sentence, reply.refused

    async def _write_replicas(self) -> None:
        """Write the numbers of a user's plan into the manifest, unless a user has changed them since."""
        for role, (number, seen) in list(self._unwritten_replicas.items()):
            try:
                await elasticjobs.write_replicas(self._client, self._job, role, number, seen)
            except ApiError as error:
                if error.retriable:
                    raise
                why = f"The manifest's replicas of role {role} are not updated: {error.message.rstrip('.')}."
                await self._event("ScaleRefused", why, warning=True)
            del self._unwritten_replicas[role]

    # ---- the master's own plans

    def _note_plan(self, role: str) -> None:
        """Prepare a ScalePlan object for the master's own plan; it is carried out like any other."""
        size, job = self._size(role), self._job
        if size.plans == self._plans_seen[role]:
            return
        self._resize(role, size.wanted)
        self._plans_seen[role] = size.plans
        self._unrecorded[role] = {
            "metadata": {
                # our own name, so that a retry finds the object if the first response was lost
                "name": f"{job.name}-plan-{secrets.token_hex(4)}",
                "namespace": job.namespace,
                "labels": {scaleplans.TYPE_LABEL: "auto", names.JOB_LABEL: job.name},
                "ownerReferences": [objects.owner(job)],
            },
            "spec": {
                "ownerJob": job.name,
                "reason": size.reason[: scaleplans.REASON_LIMIT],
                "replicaResourceSpecs": {role: {"replicas": size.wanted}},
            },
        }

    async def _record_plans(self) -> None:
        for role, made in list(self._unrecorded.items()):
            try:
                await self._client.ensure(SCALE_PLANS, made)
            except ApiError as error:
                if error.retriable:
                    raise
                logger.warning("The record of the job's own plan is not created: %s", error)
            del self._unrecorded[role]

    # ---- plans

    async def _carry_out_plans(self) -> None:
        """Start the oldest plan, unless one is in progress."""
        waiting = []
        for plan in sorted(self._plans.cache.values(), key=_age):
            phase = self._status_of(plan).get("phase") or ""
            if plan["spec"].get("ownerJob") != self._job.name or phase in FINAL:
                continue
            if not scaleplans.belongs(plan, self._job.metadata):
                continue  # belongs to an earlier job
            if phase == SCALING:
                await self._check_progress(plan)
                return
            waiting.append(plan)
        if waiting:
            await self._start_plan(waiting[0])

    def _status_of(self, plan: Manifest) -> Manifest:
        """Return a plan's last reported status, which the informer may not know yet."""
        return self._statuses.get(plan["metadata"]["uid"]) or plan.get("status") or {}

    async def _start_plan(self, plan: Manifest) -> None:
        job = self._current()
        if job is None or (scaleplans.owner_of(plan) is None and not await self._is_there()):
            return
        name = plan["metadata"]["name"]
        try:
            spec = _spec(plan)
            known = self._asked_by(plan)
            wanted = known or scaleplans.wanted(spec, job, self._numbers())
            numbers = self._numbers() | wanted
            migration.check(spec, self._job, self._calls.placed(), numbers)
            moved = self._begin_migration(plan, spec, numbers)
        except (ConfigurationError, msgspec.ValidationError) as error:
            await self._finish(plan, FAILED, str(error))
            return
        if not known and (spec.create_pods or spec.remove_pods):
            counted = " and ".join(scaleplans.counted(*number) for number in wanted.items())
            numbers = {_FIELDS[role]: number for role, number in wanted.items()}
            await self._set_status(plan, PENDING, f"The job will have {counted}.", **numbers)
        auto = (plan["metadata"].get("labels") or {}).get(scaleplans.TYPE_LABEL) == "auto"
        why = _why(name, spec)
        sentences: list[str] = []
        for role, number in wanted.items():
            plans = self._size(role).plans
            factors = migration.size_of_new(spec, self._job, role)
            source: Literal["user", "plan"] = "plan" if auto else "user"
            sentence, refused = self._scale(role, number, why, source, factors)
            if refused:
                await self._finish(plan, FAILED, " ".join([*sentences, sentence]))
                return
            sentences.append(sentence)
            self._plans_seen[role] += self._size(role).plans - plans  # this object is the record
            if not auto:
                manifest = self._manifests.cache.get(self._key) or {"spec": {}}
                self._unwritten_replicas[role] = number, manifest
        outcome = " ".join([*sentences, *migration.asked(spec, moved.pods)])
        about = f"{spec.reason.rstrip('.')}. {outcome}" if spec.reason else outcome
        counts = {_FIELDS[role]: self._size(role).wanted for role in wanted}
        await self._set_status(plan, SCALING, about, **counts)
        await self._event("Scaling", f"ScalePlan {name}: {outcome}")
        for note in scaleplans.notes(plan["spec"]):
            await self._event("NoEffect", f"ScalePlan {name}: {note}")
        await self._write_replicas()

    def _asked_by(self, plan: Manifest) -> dict[str, int]:
        """Return the numbers already determined for a plan, possibly by an earlier master.

        A plan for one more pod is relative to the number at its start; when resumed, it must not add another.
        """
        status = self._status_of(plan)
        fields = {role: status.get(_FIELDS[role]) for role in self._roles}
        return {role: number for role, number in fields.items() if number is not None}

    async def _is_there(self) -> bool:
        """Return whether the job still exists; the cache may be older than a plan."""
        job = self._job
        found = await self._client.find(ELASTIC_JOBS, job.namespace, job.name)
        return found is not None and bool(found["metadata"]["uid"] == job.uid)

    async def _check_progress(self, plan: Manifest) -> None:
        status = self._status_of(plan)
        try:
            spec = _spec(plan)
            moved = self._migration_of(plan, spec)
        except (ConfigurationError, msgspec.ValidationError) as error:
            await self._finish(plan, FAILED, str(error))
            return
        roles = [role for role in self._roles if status.get(_FIELDS[role]) is not None]
        sizes = {role: self._size(role) for role in roles}
        has = " and ".join(scaleplans.counted(role, size.wanted) for role, size in sizes.items())
        began = times.read(status.get("createTime") or "") or 0.0
        why = f"{spec.reason.rstrip('.')}. " if spec.reason else ""
        if any(status.get(_FIELDS[role]) != size.wanted for role, size in sizes.items()):
            message = f"{why}Another request has changed the job to {has}."
            await self._finish(plan, FAILED, message)
            return
        moved.advance()
        if moved.failed:
            await self._finish(plan, FAILED, f"{why}{moved.failed}")
        elif self._size(WORKER).complete and not moved.missing:
            done = [*([f"The job has {has}."] if has else []), *migration.done(spec)]
            await self._finish(plan, SUCCEEDED, f"{why}{' '.join(done)}")
        elif self._client.server_time() - began > PLAN_TIMEOUT:
            waits = moved.refused or self._size(WORKER).waits_for
            late = migration.late(has, moved.missing, waits, PLAN_TIMEOUT)
            await self._finish(plan, FAILED, f"{why}{late}")

    # ---- pod replacements

    def _begin_migration(
        self, plan: Manifest, spec: ScalePlanSpec, numbers: Mapping[str, int]
    ) -> PodMigration:
        """Return a plan's replacements among the current pods that stay within ``numbers`` by role."""
        placed, why = self._calls.placed, _why(plan["metadata"]["name"], spec)
        wanted = migration.moves(spec, self._job, placed(), numbers)
        moved = PodMigration(wanted, placed, self._calls.ask_migrate, why)
        self._migration = (plan["metadata"]["uid"], moved)
        return moved

    def _migration_of(self, plan: Manifest, spec: ScalePlanSpec) -> PodMigration:
        """Return the replacements of the plan in progress, which an earlier master may have started."""
        if self._migration is None or self._migration[0] != plan["metadata"]["uid"]:
            return self._begin_migration(plan, spec, self._numbers())
        return self._migration[1]

    def _numbers(self) -> dict[str, int]:
        """Return the wanted number of nodes by role."""
        return {role: self._size(role).wanted for role in self._roles}

    # ---- status and events

    async def _finish(self, plan: Manifest, phase: str, message: str) -> None:
        await self._set_status(
            plan, phase, message, finishTime=times.written(self._client.server_time())
        )
        name, failed = plan["metadata"]["name"], phase == FAILED
        reason = "ScaleFailed" if failed else "Scaled"
        await self._event(reason, f"ScalePlan {name}: {message}", warning=failed)

    async def _set_status(self, plan: Manifest, phase: str, message: str, **more: Any) -> None:
        uid, name = plan["metadata"]["uid"], plan["metadata"]["name"]
        began = {"createTime": times.written(self._client.server_time())}
        self._statuses[uid] = {**began, **self._status_of(plan), "phase": phase, "message": message}
        self._statuses[uid] |= more
        self._unwritten[uid] = name
        await self._write(uid, name)

    async def _write(self, uid: str, name: str) -> None:
        """Write a plan's status; ignore a plan that is gone or that the server refuses."""
        patch, namespace = {"status": self._statuses[uid]}, self._job.namespace
        try:
            await self._client.amend(SCALE_PLANS, namespace, name, uid, patch, "status")
        except ApiError as error:
            if error.retriable:
                raise
            logger.warning("ScalePlan %s: %s", name, error)
        del self._unwritten[uid]

    async def _event(self, reason: str, message: str, *, warning: bool = False) -> None:
        event = JobNotice(reason, message, warning=warning)
        await elasticjobs.record_event(self._client, self._job.metadata, event, "dlrover-master")


def _spec(plan: Manifest) -> ScalePlanSpec:
    """Return a plan's spec."""
    return decoding.convert({**plan, "status": {}}, ScalePlan).spec


def _why(name: str, spec: ScalePlanSpec) -> str:
    """Return the reason that a plan gives for its actions, as a clause."""
    return f"ScalePlan {name} ({spec.reason.rstrip('.')})" if spec.reason else f"ScalePlan {name}"


def _age(plan: Manifest) -> tuple[str, str]:
    metadata = plan["metadata"]
    return str(metadata.get("creationTimestamp") or ""), metadata["name"]
