"""The jobs in the Brain's history: a list, and the page of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from dlrover.dashboard import ended
from dlrover.dashboard.actions import Action
from dlrover.dashboard.feed import PageFeed
from dlrover.errors import ConfigurationError, DLRoverError
from dlrover.rpc.brain import BrainClient
from dlrover.spec.brain import Story
from dlrover.spec.jobdir import TlsFiles

PREFIX = "brain//"
"""How the ids of its jobs begin in addresses."""
PAUSE = 10.0
"""Seconds between two questions about a job."""


class BrainJobs:
    """The history of one Brain."""

    def __init__(self, address: str, token: str, tls: TlsFiles) -> None:
        self.address = address
        self._token, self._tls = token, tls

    async def rows(self, most: int) -> list[dict[str, Any]]:
        """Return a row for each job, the latest first."""
        async with self._client() as client:
            rows = await client.jobs(most)
        return [
            {
                "id": f"{PREFIX}{row.job}",
                "name": row.job,
                "phase": row.state,
                "size": ended.size(row.shape),
                "began": row.registered,
                "seconds": None if row.ended is None else row.ended - row.registered,
                "over": row.ended is not None,
                "note": row.reason or (f"{row.throughput:.3g} samples/s" if row.throughput else ""),
            }
            for row in rows
        ]

    async def story(self, job: str) -> Story:
        """Return all that is known of a job."""
        async with self._client() as client:
            return await client.explain(job)

    async def of_origin(self, origin: str) -> tuple[Story | None, str]:
        """Return all that is known of the job made from an object, or a sentence's end that says why there is nothing."""
        try:
            async with self._client() as client:
                rows = await client.jobs(1, origin=origin)
                found = [row.job for row in rows if row.description.origin == origin]
                if found:
                    return await client.explain(found[0]), ""
        except DLRoverError as error:
            return None, f"the Brain's history is not shown: {str(error).rstrip('.')}"
        return None, "the Brain has no such job, as only jobs that scale by themselves report to it"

    def find(self, job: str) -> BrainJob | None:
        """Return the page of a job by the id in its row; None if it is not one of these."""
        return BrainJob(self, job.removeprefix(PREFIX)) if job.startswith(PREFIX) else None

    def _client(self) -> BrainClient:
        return BrainClient(self.address, self._token, self._tls)


class BrainJob:
    """The page of a job in the Brain's history, which has neither logs nor buttons."""

    def __init__(self, brain: BrainJobs, job: str) -> None:
        self._brain, self._job = brain, job
        self._feed = PageFeed(job, lambda: (self._follow(),))

    def view(self) -> AsyncIterator[str]:
        """Yield the page's parts as server-sent events."""
        return self._feed.view()

    async def log(self, name: str) -> AsyncGenerator[str, None]:
        """Refuse, as there are no logs.

        Raises:
            ConfigurationError: always.
        """
        for _ in ():
            yield ""  # pragma: no cover - which makes this a generator
        raise ConfigurationError(f"The Brain has no logs, such as {name}.")

    async def act(self, action: Action) -> dict[str, Any]:
        """Refuse, as there are no buttons.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("The Brain only knows this job: open its own page to act on it.")

    async def _follow(self) -> None:
        while True:
            problem = ""
            try:
                for name, value in ended.of_story(await self._brain.story(self._job)).items():
                    self._feed.publish(name, value)
            except DLRoverError as error:
                problem = str(error)
            self._feed.publish("unreachable", {"text": problem})
            await asyncio.sleep(PAUSE)
