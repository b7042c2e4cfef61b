"""What the cluster says about pods in Events alone, such as that a volume cannot be mounted."""

from __future__ import annotations

import asyncio
import logging
import time

from dlrover._util import tasks
from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api.client import EVENTS, Client
from dlrover.kubernetes.machine import pods
from dlrover.kubernetes.resources.types import Manifest

logger = logging.getLogger(__name__)

PERIOD = 10.0
"""Minimum seconds between two requests for the Events of a namespace."""


class Notices:
    """By the uid of a pod, why its machine cannot prepare it. Use one for all jobs of a namespace."""

    def __init__(self, client: Client, namespace: str, background: set[asyncio.Task[None]]) -> None:
        self._client, self._namespace, self._background = client, namespace, background
        self._next = 0.0
        self.known: dict[str, str] = {}
        """As of the last look."""

    def look(self) -> None:
        """Look at the Events in the background, unless the last look was a short time ago: nothing waits for them."""
        now = time.monotonic()
        if now >= self._next:
            self._next = float("inf")
            tasks.start(self._look(), self._background)

    async def _look(self) -> None:
        try:
            self.known = pods.notices(await self._events())
        except InfrastructureError as error:
            logger.info("Events in %s: %s", self._namespace, error)
        finally:
            self._next = time.monotonic() + PERIOD

    async def _events(self) -> list[Manifest]:
        """Return the warnings, and what supersedes them; ten thousand pods that start have no warnings."""
        about = "involvedObject.kind=Pod"
        found, _ = await self._client.list(EVENTS, self._namespace, fields=f"{about},type=Warning")
        if pods.notices(found):
            more, _ = await self._client.list(
                EVENTS, self._namespace, fields=f"{about},reason=Pulling"
            )
            found += more
        return found
