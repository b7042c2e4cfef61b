"""The operator: it watches ElasticJobs and their objects, and carries out `reconcile`'s decisions."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dlrover._util import backoff, tasks
from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api.client import ELASTIC_JOBS, PODS, SERVICES, Client, Resource
from dlrover.kubernetes.api.informer import Informer
from dlrover.kubernetes.api.notices import Notices
from dlrover.kubernetes.machine import objects
from dlrover.kubernetes.machine.decisions import Observed
from dlrover.kubernetes.machine.pods import is_preparing
from dlrover.kubernetes.machine.reconcile import reconcile
from dlrover.kubernetes.machine.yielding import Claim
from dlrover.kubernetes.operator import apply
from dlrover.kubernetes.operator.apply import Result
from dlrover.kubernetes.operator.leader import Leader
from dlrover.kubernetes.operator.scaleplans import ScalePlans
from dlrover.kubernetes.operator.stats import Stats
from dlrover.kubernetes.operator.workqueue import WorkQueue
from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.types import Manifest

logger = logging.getLogger(__name__)

WORKERS = 16
"""Jobs processed concurrently."""
RETRY = 1.0, 60.0
"""First and maximum seconds before a failed job is tried again."""
FOUND_AGAIN = 1.0
"""Seconds to wait when the API server's state is newer than the cache."""

TAKEN_AGAIN = 5.0
"""Seconds before checking again whether a foreign object has released a name that a job needs."""


class ByJob:
    """An informer for objects labelled with a job's name, indexed by the job's key."""

    def __init__(
        self,
        client: Client,
        resource: Resource,
        namespace: str | None,
        on_change: Callable[[str], None],
    ) -> None:
        self.informer = Informer(client, resource, namespace, names.JOB_LABEL, self._changed)
        self._on_change = on_change
        self._job_of: dict[str, str] = {}
        self._of_job: dict[str, set[str]] = {}

    def of(self, job: str) -> list[Manifest]:
        """Return a job's objects."""
        cache = self.informer.cache
        return [cache[key] for key in sorted(self._of_job.get(job, ())) if key in cache]

    def _changed(self, key: str) -> None:
        obj = self.informer.cache.get(key)
        before, job = self._job_of.pop(key, ""), ""
        if obj is not None:
            metadata = obj["metadata"]
            job = f"{metadata['namespace']}/{metadata['labels'][names.JOB_LABEL]}"
            self._job_of[key] = job
            self._of_job.setdefault(job, set()).add(key)
        if before and before != job:
            of_job = self._of_job[before]
            of_job.discard(key)
            if not of_job:
                del self._of_job[before]
            self._on_change(before)
        if job:
            self._on_change(job)


class Operator:
    """Reconciles all ElasticJobs of one namespace; of the cluster if ``namespace`` is None.

    Without ``leader``, it leads from the start.
    """

    def __init__(
        self,
        client: Client,
        namespace: str | None,
        master_image: str,
        leader: Leader | None = None,
    ) -> None:
        self.stats = Stats()
        client.on_call = self.stats.called
        self._client, self._master_image, self._leader = client, master_image, leader
        self._queue = WorkQueue(self.stats.waits)
        self._jobs = Informer(client, ELASTIC_JOBS, namespace, "", self._job_changed)
        self._pods = ByJob(client, PODS, namespace, self._queue.add)
        self._services = ByJob(client, SERVICES, namespace, self._queue.add)
        self._scale_plans = ScalePlans(client, namespace, self._manifest)
        self._delays: dict[str, Iterator[float]] = {}
        """Of jobs whose last attempt failed."""
        self._written: dict[str, int] = {}
        self._claims: dict[str, Claim] = {}
        self._notices: dict[str, Notices] = {}
        """By namespace."""
        self._background: set[asyncio.Task[None]] = set()
        self._informers = [self._jobs, self._pods.informer, self._services.informer]

    @property
    def waiting(self) -> int:
        """Number of jobs waiting to be processed."""
        return self._queue.depth

    def phases(self) -> Iterator[str]:
        """Yield the state of each job."""
        for job in self._jobs.cache.values():
            yield (job.get("status") or {}).get("phase") or "Created"

    @property
    def obstacle(self) -> str:
        """Why it is not ready; empty if it is. A standby is ready once it has read the Lease."""
        if not self.stats.leads:
            seen = self._leader is not None and self._leader.informed
            return "" if seen else "The operator has not read its Lease yet."
        return next(filter(None, (informer.obstacle for informer in self._informers)), "")

    async def run(self) -> None:
        """Wait for leadership; work while this operator leads.

        Raises:
            InfrastructureError: it no longer holds the Lease.
        """
        if self._leader is None:
            self.stats.leads = True
            await self._reconcile_all()
            return
        await self._leader.acquire()
        self.stats.leads = True
        running = asyncio.create_task(self._reconcile_all())
        holding = asyncio.create_task(self._leader.hold())
        try:
            await asyncio.wait([running, holding], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            raise InfrastructureError(f"{await holding} This operator exits.")
        finally:
            self.stats.leads = False
            await tasks.stop([running, holding])
            await self._leader.release()

    async def _reconcile_all(self) -> None:
        """Work until cancelled."""
        running = [asyncio.create_task(informer.run()) for informer in self._informers]
        try:
            for informer in self._informers:
                await informer.synced.wait()
            running.append(asyncio.create_task(self._scale_plans.run()))
            running += [asyncio.create_task(self._work()) for _ in range(WORKERS)]
            await asyncio.gather(*running)
        finally:
            self._queue.close()
            await tasks.stop([*running, *self._background])

    def _manifest(self, key: str) -> Manifest | None:
        return self._jobs.cache.get(key)

    def _job_changed(self, key: str) -> None:
        self._queue.add(key)
        spec = (self._jobs.cache.get(key) or {}).get("spec") or {}
        for role in spec.get("roles") or ():
            self._queue.add(names.job_of_role(key, role))
        self._scale_plans.job_changed(key)

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            # In its own task, so that a defect triggered by one job does not stop the others.
            task = asyncio.create_task(self._reconcile(key))
            began = time.monotonic()
            try:
                await asyncio.wait([task])
            finally:
                task.cancel()
                self._queue.done(key)
                self.stats.reconciles.add(time.monotonic() - began)
            error = task.exception()
            if error is None:
                self._delays.pop(key, None)
                again = task.result()
            else:
                again = self._retry(key, error)
            if again is not None:
                self._queue.add_after(key, again)

    def _retry(self, key: str, error: BaseException) -> float:
        """Record a failure and return the seconds until the job is retried."""
        self.stats.failures += 1
        again = next(self._delays.setdefault(key, backoff.delays(*RETRY)))
        defect = None if isinstance(error, InfrastructureError) else error
        logger.warning("Job %s is retried in %.0f s: %s", key, again, error, exc_info=defect)
        return again

    async def _reconcile(self, key: str) -> float | None:
        """Decide about a job and carry it out; return the seconds until the next look, or None."""
        job = self._jobs.cache.get(key)
        if job is None:
            self._written.pop(key, None)
            self._claims.pop(key, None)
            return None
        if _version(job) < self._written.get(key, 0):
            return FOUND_AGAIN  # the cache is older than our own last write
        pods = self._pods.of(key)
        result, again = await self._decide(key, job, pods)
        if result.stale:
            hidden = await self._hidden(job, pods)
            if hidden is not None:
                result, again = await self._decide(key, job, [*pods, hidden])
                again = min(again or TAKEN_AGAIN, TAKEN_AGAIN)  # no event reports its deletion
        if result.job is not None:
            self._written[key] = _version(result.job)
        if result.taken:
            return TAKEN_AGAIN
        return FOUND_AGAIN if result.stale else again

    async def _hidden(self, job: Manifest, known: list[Manifest]) -> Any:
        """Return the pod with the master's name that lacks this job's label; None if there is none."""
        metadata = job["metadata"]
        name = names.master_name(metadata["name"])
        if any(pod["metadata"]["name"] == name for pod in known):
            return None
        pod = await self._client.find(PODS, metadata["namespace"], name)
        if pod is None:
            return None
        label = (pod["metadata"].get("labels") or {}).get(names.JOB_LABEL)
        return None if label == metadata["name"] else pod  # else the informer sees it soon

    async def _decide(
        self, key: str, job: Manifest, pods: list[Manifest]
    ) -> tuple[Result, float | None]:
        """Decide with these pods and carry it out; return the result and when to decide again."""
        services = self._services.of(key)
        rivals = tuple(self._claims.values())
        above = objects.parent(job["metadata"])
        parent = (
            self._manifest(f"{job['metadata']['namespace']}/{above['name']}") if above else None
        )
        service = services[0] if services else None
        noticed = self._noticed(job["metadata"]["namespace"], pods)
        seen = Observed(job, pods, service, rivals, noticed, parent)
        decision = reconcile(
            seen, self._client.server_time(), self._master_image, secrets.token_hex(16)
        )
        if decision.claim is None:
            self._claims.pop(key, None)
        else:
            self._claims[key] = decision.claim
        result = await apply.carry_out(self._client, job, decision)
        return result, decision.again

    def _noticed(self, namespace: str, pods: list[Manifest]) -> Mapping[str, str]:
        """Return what is known of pods that their machines cannot prepare; look again if there may be some."""
        if not any(map(is_preparing, pods)):
            return {}
        if namespace not in self._notices:
            self._notices[namespace] = Notices(self._client, namespace, self._background)
        self._notices[namespace].look()
        return self._notices[namespace].known


def _version(obj: Mapping[str, Any]) -> int:
    """Return the resource version as an increasing number."""
    text = str(obj["metadata"].get("resourceVersion") or "")
    return int(text) if text.isdecimal() else 0
