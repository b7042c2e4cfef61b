"""The master's part of scaling: it follows the replicas of its ElasticJob, and carries out its ScalePlans.

A user's number is in the manifest (``spec.replicaSpecs.worker.replicas``), where a ScalePlan of a user is
written, too: a master that starts without a journal reads it there. A plan that is not a user's leaves the
manifest as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.kubernetes import names, nodes, objects, scaleplans, times, validation
from dlrover.kubernetes.apply import tell
from dlrover.kubernetes.client import ApiError, Client
from dlrover.kubernetes.decisions import Event
from dlrover.kubernetes.informer import Informer
from dlrover.kubernetes.job import ELASTIC_JOBS
from dlrover.kubernetes.scaleplans import FAILED, FINAL, SCALE_PLANS, SCALING, SUCCEEDED
from dlrover.kubernetes.types import ElasticJob, ScalePlan
from dlrover.platform.base import AskScale, JobSize

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]
POLL = 1.0
"""Seconds between two looks at how far a plan is."""
PLAN_TIMEOUT = 600.0
"""Seconds that a plan gets until the job has the nodes that it asks for."""
_COMPONENT = "dlrover-master"


class Scaler:
    """Scales one job as its manifest and its plans say. Use it on one event loop."""

    def __init__(
        self,
        client: Client,
        job: ElasticJob,
        size: Callable[[], JobSize],
        ask: AskScale,
        resize: Callable[[int], None],
    ) -> None:
        """Make it; `run` begins.

        Args:
            client: For the API server.
            job: As the master began with it.
            size: How many nodes the job is to have now.
            ask: For another number.
            resize: Called with each new number, before the nodes are made.
        """
        self._client, self._job = client, job
        self._size, self._ask, self._resize = size, ask, resize
        self._changed = asyncio.Event()
        # the number in the manifest that was last looked at
        self._seen = 0
        self._plans_seen = 0
        # by uid: what was said of a plan, and the names of those of which it is not written yet
        self._said: dict[str, Manifest] = {}
        self._unwritten: dict[str, str] = {}
        # a number that is not in the manifest yet
        self._to_keep: int | None = None
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
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), POLL)
        finally:
            for task in following:
                task.cancel()

    def _wake(self, _key: str) -> None:
        self._changed.set()

    def _begin(self) -> None:
        """Go on where the last master was, which may have left a journal or not."""
        size = self._size()
        self._seen, self._plans_seen = size.asked, size.plans
        self._resize(size.wanted)
        if size.wanted > size.asked and not size.plans:
            # Pods that were leaving when a journal was lost are not wanted.
            self._seen = -1

    async def _look(self) -> None:
        try:
            for uid, name in list(self._unwritten.items()):
                await self._write(uid, name)
            await self._keep()
            await self._follow_manifest()
            await self._record_plan()
            await self._carry_out_plans()
        except InfrastructureError as error:
            logger.info("Scaling goes on later: %s", error)

    # ---- the manifest

    async def _follow_manifest(self) -> None:
        job = self._current()
        worker = job.spec.replica_specs.get(nodes.WORKER) if job is not None else None
        if worker is None or worker.replicas == self._seen:
            return
        number, size = worker.replicas, self._size()
        self._seen = number
        if number == size.asked and (size.plans or number == size.wanted):
            return  # a plan wrote it
        reason = f"spec.replicaSpecs.worker.replicas is {number}"
        sentence, refused = self._scale(number, reason, "user")
        if refused:
            sentence = f"{reason}, and the job goes on as it is. {sentence}"
        await self._event("ScaleRefused" if refused else "Scaled", sentence, warning=refused)

    def _current(self) -> ElasticJob | None:
        """The job as its manifest says now; None while that is wrong, or gone."""
        manifest = self._manifests.cache.get(f"{self._job.namespace}/{self._job.name}")
        uid = self._job.metadata.get("uid")
        if manifest is None or manifest["metadata"].get("uid") != uid:
            return None
        try:
            return validation.parse(manifest)
        except ConfigurationError:
            return None  # the operator says so

    def _scale(self, number: int, reason: str, source: Literal["user", "plan"]) -> tuple[str, bool]:
        """Ask for a number of workers; what follows, and whether that is a refusal."""
        reply = self._ask(number, reason, source)
        self._resize(self._size().wanted)
        return reply.sentence, reply.refused

    async def _keep(self) -> None:
        """Write the number of a user's plan into the manifest."""
        number, job = self._to_keep, self._job
        if number is None:
            return
        patch = {"spec": {"replicas": number}}
        try:
            await self._client.patch(ELASTIC_JOBS, job.namespace, job.name, patch, "scale")
        except ApiError as error:
            if error.passing:
                raise
            why = f"The manifest keeps its number of workers: {error.message.rstrip('.')}."
            await self._event("ScaleRefused", why, warning=True)
        self._to_keep = None

    # ---- plans that were made here

    async def _record_plan(self) -> None:
        """Keep a plan of the master's own where users look for it; it is carried out like any other."""
        size, job = self._size(), self._job
        if size.plans == self._plans_seen:
            return
        self._resize(size.wanted)
        made = {
            "metadata": {
                "generateName": f"{job.name}-plan-",
                "namespace": job.namespace,
                "labels": {scaleplans.TYPE_LABEL: "auto", names.JOB_LABEL: job.name},
                "ownerReferences": [objects.owner(job)],
            },
            "spec": {
                "ownerJob": job.name,
                "reason": size.reason[: scaleplans.REASON_LIMIT],
                "replicaResourceSpecs": {nodes.WORKER: {"replicas": size.wanted}},
            },
        }
        self._plans_seen = size.plans
        await self._client.create(SCALE_PLANS, made)

    # ---- plans

    async def _carry_out_plans(self) -> None:
        """Take up the oldest plan, unless one is being carried out."""
        waiting = []
        for plan in sorted(self._plans.cache.values(), key=_age):
            phase = self._status_of(plan).get("phase") or ""
            if plan["spec"].get("ownerJob") != self._job.name or phase in FINAL:
                continue
            if phase == SCALING:
                await self._see_whether_done(plan)
                return
            waiting.append(plan)
        if waiting:
            await self._take_up(waiting[0])

    def _status_of(self, plan: Manifest) -> Manifest:
        """What was last said of a plan; the informer may not know it yet."""
        return self._said.get(plan["metadata"]["uid"]) or plan.get("status") or {}

    async def _take_up(self, plan: Manifest) -> None:
        job = self._current()
        if job is None:
            return
        name = plan["metadata"]["name"]
        try:
            spec = msgspec.convert({**plan, "status": {}}, ScalePlan).spec
            number = scaleplans.wanted(spec, job, self._size().wanted)
        except (ConfigurationError, msgspec.ValidationError) as error:
            await self._finish(plan, FAILED, str(error))
            return
        auto = (plan["metadata"].get("labels") or {}).get(scaleplans.TYPE_LABEL) == "auto"
        why = f"ScalePlan {name} ({spec.reason})" if spec.reason else f"ScalePlan {name}"
        plans = self._size().plans
        sentence, refused = self._scale(number, why, "plan" if auto else "user")
        if refused:
            await self._finish(plan, FAILED, sentence)
            return
        self._plans_seen += self._size().plans - plans  # this object is its record
        if not auto:
            self._to_keep = number
        about = f"{spec.reason.rstrip('.')}. {sentence}" if spec.reason else sentence
        await self._say(plan, SCALING, about, replicas=self._size().wanted)
        await self._event("Scaling", f"ScalePlan {name}: {sentence}")
        for note in scaleplans.notes(plan["spec"]):
            await self._event("NoEffect", f"ScalePlan {name}: {note}")
        await self._keep()

    async def _see_whether_done(self, plan: Manifest) -> None:
        status, size = self._status_of(plan), self._size()
        began = times.read(status.get("createTime") or "") or 0.0
        reason = plan["spec"].get("reason") or ""
        why = f"{reason.rstrip('.')}. " if reason else ""
        if status.get("replicas") != size.wanted:
            message = f"{why}The job is to have {size.wanted} workers now: somebody asked for that."
            await self._finish(plan, FAILED, message)
        elif size.complete:
            await self._finish(plan, SUCCEEDED, f"{why}The job has {size.wanted} workers.")
        elif time.time() - began > PLAN_TIMEOUT:
            message = (
                f"{why}The job does not have {size.wanted} workers after {PLAN_TIMEOUT:.0f} s; they stay "
                f"wanted: {size.waits_for.rstrip('.') or 'nothing says why'}."
            )
            await self._finish(plan, FAILED, message)

    async def _finish(self, plan: Manifest, phase: str, message: str) -> None:
        await self._say(plan, phase, message, finishTime=times.written(time.time()))
        name, failed = plan["metadata"]["name"], phase == FAILED
        reason = "ScaleFailed" if failed else "Scaled"
        await self._event(reason, f"ScalePlan {name}: {message}", warning=failed)

    async def _say(self, plan: Manifest, phase: str, message: str, **more: Any) -> None:
        uid, name = plan["metadata"]["uid"], plan["metadata"]["name"]
        began = {"createTime": times.written(time.time())}
        self._said[uid] = {**began, **self._status_of(plan), "phase": phase, "message": message}
        self._said[uid] |= more
        self._unwritten[uid] = name
        await self._write(uid, name)

    async def _write(self, uid: str, name: str) -> None:
        """Write what was said of a plan; one that is gone, or that the server refuses, is left alone."""
        patch = {"status": self._said[uid]}
        try:
            await self._client.patch(SCALE_PLANS, self._job.namespace, name, patch, "status")
        except ApiError as error:
            if error.passing:
                raise
            logger.warning("ScalePlan %s: %s", name, error)
        del self._unwritten[uid]

    async def _event(self, reason: str, message: str, *, warning: bool = False) -> None:
        manifest = {"metadata": self._job.metadata}
        await tell(self._client, manifest, Event(reason, message, warning=warning), _COMPONENT)


def _age(plan: Manifest) -> tuple[str, str]:
    metadata = plan["metadata"]
    return str(metadata.get("creationTimestamp") or ""), metadata["name"]
