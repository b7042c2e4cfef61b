"""Watcher of a job: keeps its events and status current, and waits for conditions."""

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
"""Seconds between two reads of a job's files."""
STATUS_POLL = 0.25
"""Seconds between two status requests to the master."""

Found = TypeVar("Found")


class JobOverError(Exception):
    """The job has ended during a wait for something else."""


class Watcher:
    """Observer of a job, in the background of the event loop."""

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
        """Steps known to the master, including those done again."""
        return self._status.total_steps if self._status is not None else 0

    @property
    def running(self) -> bool:
        """True if a world is formed."""
        return self._status is not None and self._status.phase == "running"

    async def watch(self) -> None:
        """Watch the job until the task is cancelled."""
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
        """Wait until a condition is true, at most ``seconds``; return its last value.

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
        """True if the job has ended."""
        ended = any(isinstance(event.body, events.JobEnded) for event in self.events[-3:])
        return ended or self._launch.exit_code() is not None

    async def until_over(self) -> None:
        """Wait for the job's end, without a time limit."""
        with contextlib.suppress(JobOverError):
            while True:
                await self.until(lambda: False, 60.0)
