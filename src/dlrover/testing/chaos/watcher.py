"""Watcher of a job: keeps its events and status current, and waits for conditions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dlrover._util import decoding
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.rpc.client import connect
from dlrover.rpc.messages import Status
from dlrover.spec import events
from dlrover.spec.events import Event
from dlrover.spec.jobdir import JobDir
from dlrover.testing.chaos.guard import Launch

POLL = 0.05
"""Seconds between two reads of a job's files."""
STATUS_POLL = 0.25
"""Seconds between two status requests to the master."""
STATUS_TIMEOUT = 2.0
"""Seconds that the master has to answer."""

Found = TypeVar("Found")


class JobOverError(Exception):
    """The job has ended during a wait for something else."""


class EventLog:
    """Events of a job, read from its file as they are written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.events: list[Event] = []

    def refresh(self) -> list[Event]:
        """Return all events so far; leave a half-written line for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self.events
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.events += [decoding.json(line, Event) for line in whole.splitlines()]
        return self.events


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


async def ask_status(job_dir: JobDir) -> Status | None:
    """Return the job's status; None if its master does not answer."""
    try:
        async with connect(job_dir, STATUS_TIMEOUT) as client:
            return await client.status()
    except _NO_ANSWER:
        return None


async def ask_to_stop(job_dir: JobDir, reason: str, exit_code: int) -> bool:
    """Ask the master to end the job; return True if it got the request."""
    try:
        async with connect(job_dir, STATUS_TIMEOUT) as client:
            await client.stop(reason, exit_code)
    except _NO_ANSWER:
        return False
    return True


_NO_ANSWER = (InfrastructureError, ConfigurationError)
