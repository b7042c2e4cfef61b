"""The jobs of a cluster: those that Kubernetes and the Brain know, if they can be reached."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dlrover.errors import DLRoverError

Source = Callable[[], Awaitable[list[dict[str, Any]]]]


class Cluster:
    """Sources of jobs by name; a source that cannot be reached gives its reason instead."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)

    async def rows(self) -> list[dict[str, Any]]:
        """Return what each source knows: ``name``, ``jobs``, and a ``problem`` if it cannot be reached."""
        found = []
        for name, source in self._sources.items():
            try:
                found.append({"name": name, "jobs": await source(), "problem": ""})
            except DLRoverError as error:
                found.append({"name": name, "jobs": [], "problem": str(error)})
        return found
