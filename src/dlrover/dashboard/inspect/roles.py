"""Status of a job of several roles: its coordinator's, or that at the end of its journal."""

from __future__ import annotations

import asyncio
import time

import msgspec

from dlrover.errors import ConfigurationError, ExitCode, InfrastructureError
from dlrover.master.files import read_outcome
from dlrover.roles.client import connect
from dlrover.roles.coordinator.status import RolesStatus, replayed
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import Outcome


class RolesReport(msgspec.Struct, frozen=True):
    """A job of several roles and its source."""

    job_dir: str
    coordinator_running: bool
    """True if the coordinator answered; False if the status is from its journal."""
    status: RolesStatus
    outcome: Outcome | None


async def report(job_dir: JobDir) -> RolesReport:
    """Return the status of the job in ``job_dir``.

    Raises:
        InfrastructureError: the coordinator does not answer, and its journal cannot be read.
    """
    outcome = read_outcome(job_dir.outcome)
    if outcome is None:
        try:
            return RolesReport(str(job_dir.path), True, await ask(job_dir), None)
        except (InfrastructureError, ConfigurationError):
            outcome = read_outcome(job_dir.outcome)  # it may have ended meanwhile
    status = await asyncio.to_thread(replayed, job_dir.journal, time.time())
    return RolesReport(str(job_dir.path), False, status, outcome)


async def ask(job_dir: JobDir) -> RolesStatus:
    """Return what the coordinator says.

    Raises:
        ConfigurationError: the directory does not contain its address.
        InfrastructureError: it does not answer.
    """
    async with connect(job_dir) as coordinator:
        return await coordinator.status()


async def stop(job_dir: JobDir, reason: str) -> None:
    """Ask the coordinator of a job to end it.

    Raises:
        ConfigurationError: the directory does not contain its address.
        InfrastructureError: it does not answer.
    """
    async with connect(job_dir) as coordinator:
        await coordinator.stop(reason, ExitCode.STOPPED)
