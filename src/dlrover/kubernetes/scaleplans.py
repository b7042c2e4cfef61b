"""ScalePlans: accepted for compatibility. Each is told in its status what to do instead."""

from __future__ import annotations

import asyncio
import logging

from dlrover.errors import InfrastructureError
from dlrover.kubernetes import names
from dlrover.kubernetes.client import Client, Resource
from dlrover.kubernetes.informer import Informer
from dlrover.kubernetes.workqueue import WorkQueue

logger = logging.getLogger(__name__)

SCALE_PLANS = Resource(names.GROUP, names.VERSION, "scaleplans", "ScalePlan")
PHASE = "NoEffect"
RETRY = 30.0
"""Seconds until a plan is told again that could not be told."""


class ScalePlans:
    """Tells each ScalePlan of a namespace, or of all of them, that it has no effect."""

    def __init__(self, client: Client, namespace: str | None) -> None:
        self._client = client
        self._queue = WorkQueue()
        self._plans = Informer(client, SCALE_PLANS, namespace, "", self._queue.add)

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
        if plan is None or (plan.get("status") or {}).get("phase") == PHASE:
            return
        job = (plan.get("spec") or {}).get("ownerJob") or "NAME"
        message = (
            "A ScalePlan is accepted for compatibility and has no effect. Change the job's replicas: "
            f"kubectl scale elasticjob/{job} --replicas=N."
        )
        namespace, _, name = key.partition("/")
        patch = {"status": {"phase": PHASE, "message": message}}
        await self._client.patch(SCALE_PLANS, namespace, name, patch, "status")
