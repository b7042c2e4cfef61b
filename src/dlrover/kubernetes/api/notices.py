"""What the cluster says about pods in Events alone, such as that a volume cannot be mounted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api.client import EVENTS, Client
from dlrover.kubernetes.machine import pods
from dlrover.kubernetes.resources.types import Manifest

logger = logging.getLogger(__name__)

PERIOD = 10.0
"""Minimum seconds between two requests for the Events of a namespace."""


class Notices:
    """By the uid of a pod, why its machine cannot prepare it."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client, self._namespace = client, namespace
        self._next = 0.0
        self.known: dict[str, str] = {}
        """As of the last `update`."""

    async def update(self, among: Iterable[Manifest]) -> None:
        """Look at the Events if a machine prepares one of these pods and the last look was some time ago."""
        if not any(map(pods.is_preparing, among)):
            self.known = {}
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + PERIOD
            try:
                events, _ = await self._client.list(
                    EVENTS, self._namespace, fields="involvedObject.kind=Pod"
                )
            except InfrastructureError as error:
                logger.info("Events in %s: %s", self._namespace, error)
            else:
                self.known = pods.notices(events)
