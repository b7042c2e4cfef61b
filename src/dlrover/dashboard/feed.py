"""One job's live content: watched while anybody looks, and shared by all who do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import msgspec

from dlrover._util import tasks
from dlrover.dashboard import actions, content, logs
from dlrover.dashboard.inspect import goodput, roles
from dlrover.dashboard.listing import roles_pages
from dlrover.errors import ConfigurationError, DLRoverError
from dlrover.master.journal import history
from dlrover.rpc import messages
from dlrover.rpc.client import MasterClient, connect
from dlrover.spec.events import Event
from dlrover.spec.jobdir import JobDir

logger = logging.getLogger(__name__)

PAUSE = 1.0
"""Minimum seconds between two updates of a part of the page."""
RETRY = 2.0
"""Seconds between two attempts to reach the master."""
SHARE = 0.1
"""Maximum share of time that goes into replays of the journal, which grow with the job."""
_NO_EVENTS = 1 << 40


class PageFeed:
    """Parts of a page as JSON texts, renewed while there are viewers, who share them.

    Args:
        name: The job's name, for the log.
        work: Makes the coroutines that publish the parts; they run while anybody looks.
    """

    def __init__(self, name: str, work: Callable[[], Iterable[Coroutine[Any, Any, None]]]) -> None:
        self._name = name
        self._work = work
        self._parts: dict[str, tuple[int, str]] = {}
        self._version = 0
        self._changed = asyncio.Event()
        self._viewers = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def view(self) -> AsyncIterator[str]:
        """Yield the parts as server-sent events: all of them first, then each that changes."""
        seen: dict[str, int] = {}
        yield f"event: fixed\ndata: {msgspec.json.encode(content.FIXED).decode()}\n\n"
        with self._viewed():
            while True:
                changed = self._changed
                for name, (version, text) in list(self._parts.items()):
                    if seen.get(name) != version:
                        seen[name] = version
                        yield f"event: {name}\ndata: {text}\n\n"
                if not await tasks.signalled(changed, logs.BEAT):
                    yield logs.ALIVE

    def publish(self, name: str, value: Any) -> None:
        """Show a part, if it has changed."""
        text = msgspec.json.encode(value).decode()
        if self._parts.get(name, (0, ""))[1] != text:
            self._version += 1
            self._parts[name] = (self._version, text)
            self._changed.set()
            self._changed = asyncio.Event()

    @contextlib.contextmanager
    def _viewed(self) -> Any:
        self._viewers += 1
        if self._viewers == 1:
            self._tasks = [asyncio.create_task(self._safely(each)) for each in self._work()]
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._ending = asyncio.ensure_future(tasks.stop(self._tasks))
                self._parts.clear()

    async def _safely(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # a task's error is silent, and the page would look as if it were live
            logger.exception("The page of %s is no longer renewed", self._name)
            self.publish(
                "problem", {"text": "This page is no longer renewed; see the server's log."}
            )


class JobFeed:
    """The live page of a job in a directory of this machine, its logs, and its buttons."""

    def __init__(self, job_dir: JobDir) -> None:
        self._job_dir = job_dir
        self._feed = PageFeed(str(job_dir.path), self._work)
        self._publish = self._feed.publish
        self._master = False
        self._fresh = asyncio.Event()
        """Set when the journal has probably more to tell."""

    def view(self) -> AsyncIterator[str]:
        """Yield the page's parts as server-sent events."""
        return self._feed.view()

    async def log(self, name: str) -> AsyncGenerator[str, None]:
        """Yield the end of a log file and what is added to it as server-sent events.

        Raises:
            ConfigurationError: the job has no such file.
        """
        path = await asyncio.to_thread(logs.find, self._job_dir, name)
        if path is None:
            raise ConfigurationError("The job has no log file of that name.")
        async for text in logs.tail(path):
            yield text

    async def act(self, action: actions.Action) -> dict[str, Any]:
        """Carry out what a button asks for.

        Raises:
            ConfigurationError: the job has ended, or it cannot be done.
            InfrastructureError: the master cannot be reached.
        """
        return await actions.carry_out(self._job_dir, action)

    def _work(self) -> Iterable[Coroutine[Any, Any, None]]:
        roles = self._job_dir.roles.exists()
        return self._follow_roles() if roles else self._follow(), self._replay(), self._look()

    # ---- the master

    async def _follow(self) -> None:
        """Show the status as the master pushes it; while no master answers, the journal tells."""
        while True:
            with contextlib.suppress(DLRoverError):
                async with connect(self._job_dir) as master:
                    await self._watch(master)
            if self._master:
                self._master = False
                self._fresh.set()
            self._publish("master", {"answers": False})
            await asyncio.sleep(RETRY)

    async def _watch(self, master: MasterClient) -> None:
        ranks = asyncio.create_task(self._ask_ranks(master))
        last = None
        try:
            async for notice in master.watch(_NO_EVENTS, follow=True):
                self._master = True
                self._publish("master", {"answers": True})
                self._publish("status", content.of_status(notice.status))
                now = (notice.status.phase, notice.status.round, notice.status.waiting_for)
                if now != last:
                    self._fresh.set()
                last = now
                await asyncio.sleep(PAUSE)
        finally:
            ranks.cancel()

    async def _ask_ranks(self, master: MasterClient) -> None:
        while True:
            with contextlib.suppress(DLRoverError):
                self._publish("ranks", content.of_ranks(await master.ranks()))
            await asyncio.sleep(2 * PAUSE)

    async def _follow_roles(self) -> None:
        """Show what the coordinator of a job of several roles says; while it is away, its journal tells."""
        ended = False
        while True:
            began = time.monotonic()
            if not ended:
                try:
                    ended = await self._publish_roles()
                except DLRoverError as error:
                    self._master = False
                    self._publish("problem", {"text": str(error)})
            took = time.monotonic() - began
            await asyncio.sleep(PAUSE if self._master else max(RETRY, took / SHARE))

    async def _publish_roles(self) -> bool:
        """Show the roles once; return whether the job has ended."""
        found = await roles.report(self._job_dir)
        names = [role.name for role in found.status.roles]
        pages = await asyncio.to_thread(roles_pages, self._job_dir, names)
        self._master = found.coordinator_running
        self._publish("master", {"answers": self._master})
        self._publish("roles", content.of_roles(found, pages))
        return found.outcome is not None

    # ---- files

    async def _replay(self) -> None:
        """Show what the journal and the events tell, again whenever they have grown."""
        seen: object = None
        while True:
            self._fresh.clear()
            began = time.monotonic()
            grown = await asyncio.to_thread(_sizes, self._job_dir)
            if grown != seen or self._master:
                seen = grown
                found, status = await asyncio.to_thread(report, self._job_dir)
                self._publish("report", found)
                if status is not None and not self._master:
                    self._publish("status", content.of_status(status))
            took = time.monotonic() - began
            await asyncio.sleep(max(PAUSE, took / SHARE))
            await tasks.signalled(self._fresh, RETRY)

    async def _look(self) -> None:
        """Show which log files and stored checkpoints there are."""
        while True:
            began = time.monotonic()
            found = await asyncio.to_thread(logs.names, self._job_dir)
            self._publish("logs", found)
            if (
                not self._job_dir.roles.exists()
            ):  # a role's program saves, and its own page shows it
                stored = await asyncio.to_thread(content.of_checkpoints, self._job_dir)
                self._publish("checkpoints", stored)
            await asyncio.sleep(max(5 * PAUSE, (time.monotonic() - began) / SHARE))


def report(job_dir: JobDir) -> tuple[dict[str, Any], messages.Status | None]:
    """Return what the journal and the events of a job tell, and its status at their end.

    Without a journal, the report says why under ``absent``. That of a job of several roles has the events alone.
    """
    if job_dir.roles.exists():
        return {"dir": str(job_dir.path), **content.of_events(_events(job_dir))}, None
    try:
        found = goodput.report(job_dir)
        return content.of_report(found, _events(job_dir)), found.status
    except DLRoverError as error:
        return {"absent": str(error), "dir": str(job_dir.path)}, None


def _events(job_dir: JobDir) -> list[Event]:
    try:
        return history.read(job_dir.events)
    except (OSError, msgspec.DecodeError):
        return []


def _sizes(job_dir: JobDir) -> list[tuple[int, int]]:
    """Return size and time of the last change of the files that a report is made of."""
    wal = Path(f"{job_dir.journal}-wal")
    return [
        _size(path)
        for path in (
            job_dir.job,
            job_dir.roles,
            job_dir.journal,
            wal,
            job_dir.events,
            job_dir.outcome,
        )
    ]


def _size(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
