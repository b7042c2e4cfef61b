"""The clients of the Brain: one for single calls, and one that never blocks or fails a job's master."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import ClassVar, TypeVar

from dlrover._util import backoff, tasks
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError
from dlrover.rpc import wire
from dlrover.rpc.connection import REQUEST_TIMEOUT, Connection
from dlrover.spec import brain

logger = logging.getLogger(__name__)

PLAN_TIMEOUT = 60.0
"""Additional seconds that a plan may take, beyond the limit of other requests."""
KEPT_REPORTS = 1000
"""Maximum reports kept while the Brain is away; beyond it, the oldest are dropped."""
RETRY = 1.0, 5.0
"""Seconds until the first retry after the Brain could not be reached, and between later ones."""


Answer = TypeVar("Answer")


def request_id() -> str:
    """Return a unique id for a request."""
    return secrets.token_hex(16)


class BrainClient(Connection):
    """A connection to a Brain.

    Every call also raises `ConfigurationError` if the Brain does not know the job.
    """

    service: ClassVar[str] = wire.BRAIN_SERVICE
    peer: ClassVar[str] = "The Brain at"

    async def report(self, report: brain.Report) -> None:
        """Send a report; it is committed when this returns. The call may be repeated."""
        await self._call("Report", report, brain.Committed)

    async def plan(self, job: str, current: brain.Shape | None, request: str = "") -> brain.Advice:
        """Return the Brain's advice on a job's next plan.

        Args:
            job: Id of the job.
            current: Current size of the job; None if nothing runs yet.
            request: The `request_id` of an earlier attempt; a new one by default.
        """
        question = brain.AskPlan(request=request or request_id(), job=job, current=current)
        return await self._call("Plan", question, brain.Advice, PLAN_TIMEOUT)

    async def effect(self, job: str, workers: int, servers: int | None = None) -> brain.Expected:
        """Return the expected effect of other numbers of nodes on a job."""
        request = brain.AskEffect(job=job, workers=workers, servers=servers)
        return await self._call("Effect", request, brain.Expected)

    async def similar(self, job: str) -> brain.Similar:
        """Return the measurements of the past job that is most similar to a job."""
        return await self._call("Similar", brain.AskSimilar(job=job), brain.Similar)

    async def jobs(
        self, limit: int = 100, *, running: bool = False, origin: str = ""
    ) -> tuple[brain.JobRow, ...]:
        """Return the jobs that the Brain knows, latest first; ``origin``: only those of that origin."""
        request = brain.AskJobs(limit=limit, running=running, origin=origin)
        found: brain.Jobs = await self._call("Jobs", request, brain.Jobs)
        return found.jobs

    async def explain(self, job: str) -> brain.Story:
        """Return everything that the Brain knows about a job."""
        story: brain.Story = await self._call("Explain", brain.Explain(job), brain.Story)
        return story

    async def cluster(self) -> brain.ClusterResources:
        """Return the cluster's resources, in total and free."""
        found: brain.ClusterResources = await self._call(
            "Cluster", brain.AskCluster(), brain.ClusterResources
        )
        return found

    async def divide(self) -> brain.Division:
        """Return the current division of the cluster among its jobs."""
        request = brain.AskDivision()
        return await self._call("Divide", request, brain.Division, PLAN_TIMEOUT)


class BrainLink:
    """A job's link to the Brain: queues reports and does not wait for an absent Brain.

    No method raises because of the Brain. Run `run` as a task of the loop on which the other methods are
    called.
    """

    def __init__(self, client: BrainClient, job: str, description: brain.Description) -> None:
        self._client = client
        self._job = job
        self._description = description
        self._reports: deque[brain.Report] = deque()
        self._filled = asyncio.Event()
        self._settled = asyncio.Event()  # set if all reports are committed, or the Brain is away
        self.away = ""
        """Reason why the Brain cannot be reached, in words; empty while it answers."""
        self.dropped = 0
        """Number of dropped reports: the Brain was away for too long, or refused them."""
        self._register()

    def _register(self) -> None:
        if self._reports and isinstance(self._reports[0], brain.RegisterJob):
            return
        self._reports.appendleft(
            brain.RegisterJob(request=request_id(), job=self._job, description=self._description)
        )
        self._filled.set()

    def report(self, report: brain.Report) -> None:
        """Queue a report; reports are sent in order."""
        if len(self._reports) >= KEPT_REPORTS:
            self.dropped += 1
            oldest_but_one = self._reports[1]
            self._reports.remove(oldest_but_one)  # the first one may be in transit
        self._reports.append(report)
        self._filled.set()
        self._settle()

    async def plan(self, current: brain.Shape | None) -> brain.Advice | None:
        """Return advice on the job's next plan, based on all reports; None while the Brain is away."""
        return await self._ask(lambda: self._client.plan(self._job, current))

    async def similar(self) -> brain.Similar | None:
        """Return the measurements of the most similar past job; None while the Brain is away."""
        return await self._ask(lambda: self._client.similar(self._job))

    async def _ask(self, question: Callable[[], Awaitable[Answer]]) -> Answer | None:
        await self.flush(REQUEST_TIMEOUT)
        try:
            answer = await question()
        except DLRoverError as error:
            self._note(str(error))
            if isinstance(error, ConfigurationError):
                self._register()  # the Brain has lost its database
            return None
        self._note("")
        return answer

    async def run(self) -> None:
        """Send the queued reports until cancelled."""
        delays = backoff.delays(*RETRY)
        while True:
            await self._filled.wait()
            if await self._send_first():
                delays = backoff.delays(*RETRY)
            else:
                await asyncio.sleep(next(delays))
            if not self._reports:
                self._filled.clear()
            self._settle()

    async def flush(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until all reports are committed; return whether they are.

        Return at once while the Brain is away.
        """
        await tasks.signalled(self._settled, timeout)
        return not self._reports

    async def _send_first(self) -> bool:
        """Send the oldest report; return False if it stays queued because the Brain is away."""
        report = self._reports[0]
        try:
            await self._client.report(report)
        except (InfrastructureError, ConfigurationError) as error:
            self._note(str(error))
            if isinstance(error, ConfigurationError):
                self._register()  # the Brain has lost its database
            return False
        except DLRoverError as error:
            logger.warning("A report to the Brain is dropped: %s", error)
            self.dropped += 1
        else:
            self._note("")
        with contextlib.suppress(ValueError):
            self._reports.remove(report)
        return True

    def _settle(self) -> None:
        if self._reports and not self.away:
            self._settled.clear()
        else:
            self._settled.set()

    def _note(self, away: str) -> None:
        if away and not self.away:
            logger.warning("%s The job goes on without it.", away)
        elif self.away and not away:
            logger.info("The Brain answers again")
        self.away = away
        self._settle()
