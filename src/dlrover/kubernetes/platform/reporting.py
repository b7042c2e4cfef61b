"""The master's part of an ElasticJob's status: the training's progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from dlrover._util import tasks
from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api import elasticjobs
from dlrover.kubernetes.api.client import Client
from dlrover.kubernetes.machine.decisions import JobNotice
from dlrover.kubernetes.resources.types import ElasticJob
from dlrover.platform.base import Progress

logger = logging.getLogger(__name__)

PERIOD = 15.0
"""Seconds between two reports."""
SHORTEST_PERIOD = 1.0
"""Minimum seconds between two reports."""
LAST_TIMEOUT = 5.0
"""Seconds allowed for the last report when the master exits."""


class Reporter:
    """Writes changes of the training's progress into the status."""

    def __init__(
        self,
        client: Client,
        job: ElasticJob,
        progress: Callable[[], Progress],
        period: float = PERIOD,
    ) -> None:
        self._client, self._job, self._progress, self._period = client, job, progress, period
        self._reported: dict[str, Any] = {}
        self._waits = ""
        self._news = asyncio.Event()

    def waits(self, reason: str) -> None:
        """Report at once why a pod cannot be made; empty if all are made."""
        if reason != self._waits:
            self._waits = reason
            self._news.set()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            news = await tasks.signalled(self._news, self._period)
            waits = self._waits if news else ""
            self._news.clear()
            try:
                if waits:
                    await self._warn(waits)
                await self._report()
            except InfrastructureError as error:
                logger.info("The progress report is retried: %s", error)
            await asyncio.sleep(min(self._period, SHORTEST_PERIOD))

    async def close(self) -> None:
        """Send the last report."""
        try:
            await asyncio.wait_for(self._report(), LAST_TIMEOUT)
        except asyncio.TimeoutError:
            logger.info("The last progress is not reported: the API server does not answer in time")
        except InfrastructureError as error:
            logger.info("The last progress is not reported: %s", error)

    async def _warn(self, waits: str) -> None:
        event = JobNotice("PodNotCreated", waits, warning=True)
        await elasticjobs.record_event(self._client, self._job.metadata, event, "dlrover-master")

    async def _report(self) -> None:
        progress = self._progress()
        left = progress.seconds_left
        training = {
            "steps": progress.steps,
            "restarts": progress.restarts,
            "goodput": None if progress.goodput is None else f"{100 * progress.goodput:.1f}%",
            "eta": None if left is None else duration(left),
            "waits": self._waits or None,
        }
        if training == self._reported:
            return
        await elasticjobs.write_training(self._client, self._job, training)
        self._reported = training


def duration(seconds: float) -> str:
    """Return a duration for display in a column: ``40s``, ``12m``, ``3h12m``, ``2d5h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 24 else f"{hours // 24}d{hours % 24}h"
