"""The operator's reports on ScalePlans that no master handles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api.client import SCALE_PLANS, ApiError, Client
from dlrover.kubernetes.api.informer import Informer
from dlrover.kubernetes.machine import scaleplans
from dlrover.kubernetes.operator.workqueue import WorkQueue
from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.types import Manifest

logger = logging.getLogger(__name__)

RETRY = 5.0
"""Seconds before a plan is processed again after a failed write."""


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
                    await self._report(key)
                except InfrastructureError as error:
                    logger.info("ScalePlan %s: %s", key, error)
                    self._queue.add_after(key, RETRY)
                finally:
                    self._queue.done(key)
        finally:
            following.cancel()
            self._queue.close()

    async def _report(self, key: str) -> None:
        plan = self._plans.cache.get(key)
        if plan is None:
            return
        namespace, _, name = key.partition("/")
        owner = (plan.get("spec") or {}).get("ownerJob") or ""
        job = self._jobs(f"{namespace}/{owner}")
        if (
            job is not None
            and scaleplans.owner_of(plan) is None
            and scaleplans.belongs(plan, job["metadata"])
        ):
            await self._own(plan, job)
            return  # the queue returns it after this change
        before = plan.get("status") or {}
        status = scaleplans.standing(plan, job)
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
