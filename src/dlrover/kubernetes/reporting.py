"""The master's part of an ElasticJob's status: how far the training is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

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
        self._told: dict[str, Any] = {}

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
        left = progress.seconds_left
        training = {
            "steps": progress.steps,
            "restarts": progress.restarts,
            "goodput": f"{100 * progress.goodput:.1f}%",
            "eta": None if left is None else duration(left),
        }
        if training == self._told:
            return
        patch = {"status": {"training": training}}
        job = self._job
        try:
            await self._client.patch(ELASTIC_JOBS, job.namespace, job.name, patch, "status")
        except InfrastructureError as error:
            logger.info("The progress is not reported: %s", error)
        else:
            self._told = training


def duration(seconds: float) -> str:
    """As users read it in a column: ``40s``, ``12m``, ``3h12m``, ``2d5h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 24 else f"{hours // 24}d{hours % 24}h"
