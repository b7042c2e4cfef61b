"""The master's part of an ElasticJob's status: how far the training is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dlrover.errors import InfrastructureError
from dlrover.kubernetes.client import Client
from dlrover.kubernetes.job import ELASTIC_JOBS
from dlrover.kubernetes.types import ElasticJob
from dlrover.platform.base import Progress

logger = logging.getLogger(__name__)

PERIOD = 15.0
"""Seconds between two reports."""
LAST_TIMEOUT = 5.0
"""Seconds that the last report gets when the master leaves."""


class Reporter:
    """Writes the training's progress into the status, where it changed."""

    def __init__(
        self,
        client: Client,
        job: ElasticJob,
        progress: Callable[[], Progress],
        period: float = PERIOD,
    ) -> None:
        self._client, self._job, self._progress, self._period = client, job, progress, period
        self._told: Progress | None = None

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await asyncio.sleep(self._period)
            await self._tell()

    async def close(self) -> None:
        """Report for the last time."""
        try:
            await asyncio.wait_for(self._tell(), LAST_TIMEOUT)
        except asyncio.TimeoutError:
            logger.info("The last progress is not reported: the API server does not answer in time")

    async def _tell(self) -> None:
        progress = self._progress()
        if progress == self._told:
            return
        training = {
            "steps": progress.steps,
            "restarts": progress.restarts,
            "goodput": f"{100 * progress.goodput:.1f}%",
        }
        patch = {"status": {"training": training}}
        job = self._job
        try:
            await self._client.patch(ELASTIC_JOBS, job.namespace, job.name, patch, "status")
        except InfrastructureError as error:
            logger.info("The progress is not reported: %s", error)
        else:
            self._told = progress
