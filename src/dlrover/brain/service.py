"""The Brain's shell: receives messages, writes what they report, and asks the optimizers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from dlrover.brain import known, reports, tenants
from dlrover.brain.database import prune, reason
from dlrover.brain.machine.job import JobFacts, Models, Past, tenant_of
from dlrover.brain.optimizers import Optimizer, Optimizers
from dlrover.brain.tenants import Tenant
from dlrover.brain.writer import Batch, Writer
from dlrover.errors import (
    ConfigurationError,
    DLRoverError,
    InfrastructureError,
    ProtocolError,
)
from dlrover.planning.shapes import predict, ring_shape, server_shape
from dlrover.rpc.server import Server, Unary, caller
from dlrover.spec import brain
from dlrover.spec.node import Size
from dlrover.spec.plan import ResourcePlan

logger = logging.getLogger(__name__)

READERS = 4
"""Number of threads that read the database."""
DIVISION_LIFE = 30.0
"""Seconds for which a division of the cluster answers all jobs that ask."""
SILENCE = 3600.0
"""Seconds without a sample after which a job that has not ended gets no part of a division, until it asks for one.

Its master may have been deleted. What its nodes take still counts as taken.
"""
PRUNE_INTERVAL = 3600.0
"""Seconds between two searches for old records."""
PRUNE_PAUSE = 0.2
"""Seconds between two batches of deletions."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Division:
    """What an optimizer gave all its jobs at one time."""

    made: float
    advice: dict[str, brain.Advice]
    had: dict[str, brain.Shape | None]
    """What each job had at that time."""

    def part(self, job: JobFacts) -> brain.Advice | None:
        """Return what a job was given; None if it was not there or has since changed in another way."""
        if job.id not in self.advice:
            return None
        found = self.advice[job.id]
        if self.had[job.id] == job.current:
            return found
        if found.plan is not None and job.current is not None and _has(job.current, found.plan):
            return brain.Advice(reason=f"has what it was given: {found.reason}")
        return None


class Brain:
    """The Brain over one database. All methods run on one event loop; nothing here blocks it.

    ``clock`` returns the seconds since the epoch; ``tenants`` holds the limits of tenants by name.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.time,
        tenants: Mapping[str, Tenant] | None = None,
    ) -> None:
        self._engine = engine
        self._tenants = tenants or {}
        self._clock = clock
        self._writer = Writer(engine)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="brain-reader")
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="brain-planner")
        self._optimizers = Optimizers()
        self._models = Models()
        self._divisions: dict[str, _Division] = {}
        self._dividing = asyncio.Lock()

    def register(self, server: Server) -> None:
        """Register the Brain's methods with a server."""
        for name, request, call in (
            ("Report", brain.Report, self.report),
            ("Plan", brain.AskPlan, self.plan),
            ("Effect", brain.AskEffect, self.effect),
            ("Similar", brain.AskSimilar, self.similar),
            ("Jobs", brain.AskJobs, self.jobs),
            ("Explain", brain.Explain, self.explain),
            ("Cluster", brain.AskCluster, self.cluster),
            ("Divide", brain.AskDivision, self.divide),
        ):
            server.unary(name, request, self._of_caller(call))

    def _of_caller(self, call: Callable[[Any], Any]) -> Unary:
        """Return a method for callers that are tenants: the ids they name are their own jobs'."""

        async def scoped(request: Any) -> Any:
            tenant = caller.get()
            own = tenants.own(request, tenant, self._tenants.get(tenant))
            return tenants.shown(await call(own), tenant)

        return scoped

    def close(self) -> None:
        """Write what waits, and close the database."""
        self._writer.close()
        self._readers.shutdown()
        self._planner.shutdown()
        self._engine.dispose()

    # ---- methods on the wire

    async def report(self, report: brain.Report) -> brain.Committed:
        """Write a report; the answer means that it is committed."""
        now = self._clock()
        committed: brain.Committed = await self._write(
            lambda batch: reports.write(batch, report, now),
            report.request,
            getattr(report, "job", ""),
        )
        return committed

    async def plan(self, asked: brain.AskPlan) -> brain.Advice:
        """Return what a job should have next."""
        if asked.current is not None:
            reports.checked(asked.current)
        earlier = await self._read(lambda c: known.plan_by_id(c, asked.request))
        if earlier is not None:
            return _advice_again(earlier)
        job = await self._read(lambda c: known.one_job(c, asked.job))
        _check_reported(job, asked.current)
        job = dataclasses.replace(job, current=asked.current)
        name, optimizer = self._optimizers.of(job.description)
        if optimizer.whole:
            advice = await self._from_division(name, optimizer, job)
        else:
            past, cluster = await self._surroundings(tenant_of(job.id))
            advice = (await self._advise(optimizer, [job], past, cluster))[job.id]
        return await self._keep(asked, advice, name)

    async def effect(self, asked: brain.AskEffect) -> brain.Expected:
        """Return what a job would do with other numbers of nodes."""
        job = await self._read(lambda c: known.one_job(c, asked.job))
        if job.current is None or not job.samples:
            raise ConfigurationError(
                f"No throughput of job {asked.job} has been reported yet: nothing can be predicted."
            )
        return await self._plan_thread(functools.partial(_expected, self._models, job, asked))

    async def similar(self, asked: brain.AskSimilar) -> brain.Similar:
        """Return the measurements of the past job most like a job."""
        return await self._read(lambda c: known.similar(c, asked.job))

    async def jobs(self, asked: brain.AskJobs) -> brain.Jobs:
        """Return the jobs, the latest first."""
        tenant = caller.get()
        return brain.Jobs(await self._read(lambda c: known.job_rows(c, asked, tenant)))

    async def explain(self, asked: brain.Explain) -> brain.Story:
        """Return all that is known of a job."""
        return await self._read(lambda c: known.story(c, asked.job))

    async def cluster(self, _asked: brain.AskCluster) -> brain.ClusterResources:
        """Return the cluster's resources."""
        return await self._read(known.the_cluster)

    async def divide(self, _asked: brain.AskDivision) -> brain.Division:
        """Divide the cluster now."""
        started = time.monotonic()
        described = brain.Description(name="", mode="cluster")
        name, optimizer = self._optimizers.of(described)
        async with self._dividing:
            advice = (await self._division(name, optimizer)).advice
        return brain.Division(advice=advice, seconds=time.monotonic() - started)

    # ---- plans

    async def _surroundings(self, tenant: str | None = None) -> tuple[Past, brain.ClusterResources]:
        return await self._read(lambda c: (known.past_jobs(c, tenant), known.the_cluster(c)))

    async def _from_division(self, name: str, optimizer: Optimizer, job: JobFacts) -> brain.Advice:
        """Return a job's part of the latest division; divide again if that is old or lacks the job."""
        async with self._dividing:
            division = self._divisions.get(name)
            if division is None or not 0 <= self._clock() - division.made <= DIVISION_LIFE:
                division = await self._division(name, optimizer, job)
            found = division.part(job)
            if found is None:
                found = (await self._division(name, optimizer, job)).advice[job.id]
        return found

    async def _division(
        self, name: str, optimizer: Optimizer, asking: JobFacts | None = None
    ) -> _Division:
        jobs = await self._read(known.cluster_jobs)
        since = self._clock() - SILENCE
        jobs = [job for job in jobs if job.heard >= since]
        jobs = [job for job in jobs if self._optimizers.of(job.description)[0] == name]
        if asking is not None:
            jobs = [asking, *(job for job in jobs if job.id != asking.id)]
        past, cluster = await self._surroundings()
        advice = await self._advise(optimizer, jobs, past, cluster)
        division = _Division(self._clock(), advice, {job.id: job.current for job in jobs})
        self._divisions[name] = division
        return division

    async def _advise(
        self,
        optimizer: Optimizer,
        jobs: list[JobFacts],
        past: Past,
        cluster: brain.ClusterResources,
    ) -> dict[str, brain.Advice]:
        return await self._plan_thread(lambda: optimizer.advise(jobs, past, cluster))

    async def _keep(self, asked: brain.AskPlan, advice: brain.Advice, name: str) -> brain.Advice:
        """Write a plan; its request identifies it."""
        if advice.plan is None:
            return brain.Advice(reason=advice.reason, optimizer=name)
        plan, now = advice.plan, self._clock()

        def write(batch: Batch) -> brain.PlanRecord | None:
            earlier = known.plan_by_id(batch.connection, asked.request)
            if earlier is None:
                reports.insert_plan(
                    batch,
                    asked.job,
                    asked.request,
                    plan,
                    now,
                    optimizer=name,
                    shape=asked.current,
                )
            return earlier

        earlier = await self._write(write)
        if earlier is not None:
            return _advice_again(earlier)
        return brain.Advice(reason=plan.reason, plan=plan, plan_id=asked.request, optimizer=name)

    # ---- retention

    async def keep_pruned(self, days: float) -> None:
        """Delete records older than ``days`` at intervals; run until cancelled."""
        while True:
            try:
                deleted = await self._write(functools.partial(_prune, self._clock(), days))
            except InfrastructureError as error:
                logger.warning("Old records stay for now: %s", error)
                deleted = 0
            await asyncio.sleep(PRUNE_PAUSE if deleted else PRUNE_INTERVAL)

    # ---- threads

    async def _write(self, write: Callable[[Batch], Any], request: str = "", job: str = "") -> Any:
        return await asyncio.wrap_future(self._writer.submit(write, request, job))

    async def _read(self, read: Callable[[Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self._read_now, read)

    def _read_now(self, read: Callable[[Connection], T]) -> T:
        try:
            with self._engine.connect().execution_options(writes=False) as connection:
                return read(connection)
        except DBAPIError as error:
            raise InfrastructureError(f"The database failed: {reason(error)}.") from error

    async def _plan_thread(self, plan: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._planner, _planned, plan)


def _check_reported(job: JobFacts, current: brain.Shape | None) -> None:
    """Refuse a size that a tenant's job claims but has not reported: a division leaves it part of that size.

    Raises:
        ProtocolError: no recent sample has it.
    """
    if current is None or not tenant_of(job.id):
        return
    if all(current.groups != sample.shape.groups for sample in job.samples):
        count = current.groups["worker"].count
        raise ProtocolError(
            f"current has {count} worker nodes, and the job has reported no sample of that size: report one first."
        )


def _has(shape: brain.Shape, plan: ResourcePlan) -> bool:
    """Return whether a job has what it was given."""
    share = None if plan.batch is None else -(-plan.batch // ring_shape(shape).replicas)
    return shape.groups == plan.groups and share in (None, shape.batch * shape.passes)


def _planned(plan: Callable[[], T]) -> T:
    """Return an optimizer's answer; an optimizer may be third-party code and fail in any way."""
    try:
        return plan()
    except DLRoverError:
        raise
    except Exception as error:
        logger.exception("An optimizer failed")
        raise InfrastructureError(f"The optimizer failed: {error}.") from error


def _prune(now: float, days: float, batch: Batch) -> int:
    batch.flush()
    return prune(batch.connection, now, days)


def _advice_again(record: brain.PlanRecord) -> brain.Advice:
    return brain.Advice(
        reason=record.plan.reason,
        plan=record.plan,
        plan_id=record.plan_id,
        optimizer=record.optimizer,
    )


def _expected(models: Models, job: JobFacts, asked: brain.AskEffect) -> brain.Expected:
    model, current = models.of(job), job.current
    assert model is not None
    assert current is not None
    shape = job.resized(current, Size(asked.workers, asked.servers or 0))
    axes = server_shape if job.description.strategy == "ps" else ring_shape
    region = job.terms.region
    measured = [sample.shape for sample in model.samples]
    before, after = predict(model, current).throughput, predict(model, shape)
    return brain.Expected(
        shape=shape,
        before=current,
        plan=ResourcePlan(
            groups=shape.groups,
            reason=f"{after.throughput / before - 1:+.0%} throughput",
            effect=after.effect(before=before),
        ),
        inside=region.contains(axes(shape), measured),
    )
