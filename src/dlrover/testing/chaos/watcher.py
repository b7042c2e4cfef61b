"""What a run knows of its job at any moment, and waits for what it wants to know."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from dlrover.rpc.messages import Status
from dlrover.spec import events
from dlrover.spec.events import Event
from dlrover.spec.jobdir import JobDir
from dlrover.testing.chaos.launch import Launch
from dlrover.testing.chaos.sources import EventLog, ask_status

POLL = 0.05
"""Seconds between two looks at the files of a job."""
STATUS_POLL = 0.25
"""Seconds between two questions to its master."""

Found = TypeVar("Found")


class JobOverError(Exception):
    """The job has ended while something else was waited for."""


class Watcher:
    """Looks at a job all the time, in the background of the event loop."""

    def __init__(self, job_dir: JobDir, launch: Launch) -> None:
        self._job_dir = job_dir
        self._launch = launch
        self._log = EventLog(job_dir.events)
        self._status: Status | None = None
        self.first_step_at = 0.0
        """Seconds since the epoch; 0 before the first step."""

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        return self._log.events

    @property
    def steps(self) -> int:
        """Steps that the job has made, those done again included, as far as the master has heard."""
        return self._status.total_steps if self._status is not None else 0

    @property
    def running(self) -> bool:
        """Whether a world is formed."""
        return self._status is not None and self._status.phase == "running"

    async def watch(self) -> None:
        """Look, until the task is cancelled."""
        while True:
            self._look()
            self._status = await ask_status(self._job_dir) or self._status
            if not self.first_step_at and self.steps > 0:
                self.first_step_at = time.time()
            until = time.monotonic() + STATUS_POLL
            while time.monotonic() < until:
                await asyncio.sleep(POLL)
                self._look()

    def _look(self) -> None:
        self._log.refresh()

    async def until(self, condition: Callable[[], Found], seconds: float) -> Found:
        """The value of a condition once it is true, or after so long.

        Raises:
            JobOverError: the job has ended.
        """
        until = time.monotonic() + seconds
        while not (value := condition()) and time.monotonic() < until:
            if self.over:
                raise JobOverError
            await asyncio.sleep(POLL)
        return value

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        ended = any(isinstance(event.body, events.JobEnded) for event in self.events[-3:])
        return ended or self._launch.exit_code() is not None

    async def until_over(self) -> None:
        """Wait for the job's end, however long that takes."""
        with contextlib.suppress(JobOverError):
            while True:
                await self.until(lambda: False, 60.0)
