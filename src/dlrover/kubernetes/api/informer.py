"""A local copy of the server's objects, kept current: list, watch, and list again after a failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from dlrover._util import backoff
from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api.client import WATCH_TIMEOUT, ApiError, Client, Resource
from dlrover.kubernetes.resources.types import Manifest

logger = logging.getLogger(__name__)

RESYNC = 600.0
"""Seconds after which all objects are listed and reported again, changed or not."""
RETRY = 0.2, 30.0
"""First and maximum seconds before a retry after a failure."""
SHORT_WATCH = 0.5
"""Seconds that an accepted watch lasts at least if something between here and the server does not cut it at once."""
BLIND = 120.0
"""Seconds without an answer after which the objects count as unseen; a watch without news ends earlier."""


class Informer:
    """Follows the objects of one kind that match a label selector and a field selector.

    It calls ``on_change`` with the key of each added, changed, or deleted object. The callback looks the
    object up in `cache`, which lacks deleted objects. One call may cover several changes; intermediate
    states are not reported. No change is lost permanently: after any failure the informer lists the objects
    again.
    """

    def __init__(  # noqa: PLR0913 - what to follow, and how
        self,
        client: Client,
        resource: Resource,
        namespace: str | None,
        labels: str,
        on_change: Callable[[str], None],
        *,
        fields: str = "",
        resync: float = RESYNC,
        watch_timeout: float = WATCH_TIMEOUT,
    ) -> None:
        self.cache: dict[str, Manifest] = {}
        """Objects by key (``namespace/name``); read only."""
        self.synced = asyncio.Event()
        """Set after the first list of the objects."""
        self._client = client
        self._resource = resource
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._on_change = on_change
        self._resync = resync
        self._watch_timeout = watch_timeout
        self._version = ""
        self._listed = 0.0
        self._answered = 0.0
        self._healthy = False
        self._why = ""

    async def run(self) -> None:
        """Follow the objects until cancelled."""
        delays = backoff.delays(*RETRY)
        while True:
            self._healthy = False
            try:
                if not self._version or time.monotonic() - self._listed > self._resync:
                    await self._list()
                await self._watch()
            except InfrastructureError as error:
                self._why = str(error)
                asked = error.retry_after if isinstance(error, ApiError) else None
                if isinstance(error, ApiError) and not error.passing:
                    self._version = ""  # 410: the version is too old; others: a list may show why
                    self._healthy |= error.status == 410  # as after a restart of the server
                if self._healthy:
                    delays = backoff.delays(*RETRY)
                pause = next(delays) if asked is None else min(RETRY[1], asked)
                refused = isinstance(error, ApiError) and error.status in (403, 404)
                level = logging.WARNING if refused else logging.INFO
                logger.log(level, "Watching %s resumes in %.1f s: %s", self.what, pause, error)
                await asyncio.sleep(pause)
            else:
                self._answered = time.monotonic()
                if self._healthy:
                    delays = backoff.delays(*RETRY)
                else:
                    await asyncio.sleep(next(delays))

    @property
    def obstacle(self) -> str:
        """Why the cache is not current; empty while it is."""
        if not self.synced.is_set():
            return f"{self.what} are not listed yet{f': {self._why}' if self._why else ''}"
        silence = time.monotonic() - self._answered
        return "" if silence < BLIND else f"{self.what} are unseen for {silence:.0f} s: {self._why}"

    @property
    def what(self) -> str:
        """The followed objects, in words."""
        selectors = ",".join(filter(None, (self._labels, self._fields)))
        selected = f" with {selectors}" if selectors else ""
        return f"{self._resource.plural} in {self._namespace or 'all namespaces'}{selected}"

    async def _list(self) -> None:
        items, version = await self._client.list(
            self._resource, self._namespace, self._labels, self._fields
        )
        old, self.cache = self.cache, {key_of(item): item for item in items}
        self._version = version
        self._listed = self._answered = time.monotonic()
        for key in [*self.cache, *(key for key in old if key not in self.cache)]:
            self._on_change(key)
        self.synced.set()

    async def _watch(self) -> None:
        began = time.monotonic()
        left = self._resync - (began - self._listed)
        events = self._client.watch(
            self._resource,
            self._namespace,
            self._version,
            self._labels,
            self._fields,
            timeout=max(1.0, min(self._watch_timeout, left)),
        )
        try:
            async for kind, obj in events:
                self._answered = time.monotonic()
                if kind != "BOOKMARK":
                    self._healthy = True
                    self._change(kind, obj)
                self._version = obj["metadata"]["resourceVersion"]
        finally:
            ended = time.monotonic()
            self._healthy |= self._answered >= began and ended - began >= SHORT_WATCH

    def _change(self, kind: str, obj: Manifest) -> None:
        key = key_of(obj)
        if kind == "DELETED":
            self.cache.pop(key, None)
        else:
            self.cache[key] = obj
        self._on_change(key)


def key_of(obj: Manifest) -> str:
    """Return an object's ``namespace/name``, or only its name if it has no namespace."""
    metadata = obj["metadata"]
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata['name']}" if namespace else str(metadata["name"])
