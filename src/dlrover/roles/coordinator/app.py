"""The coordinator process: ``python -m dlrover.roles --job-dir DIR``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dlrover import config
from dlrover._util import clocks, decoding, files, logs, procs
from dlrover.errors import DamagedJournalError, DLRoverError, ExitCode, InfrastructureError
from dlrover.master import liveness
from dlrover.master.files import read_token
from dlrover.master.journal.history import History
from dlrover.roles.client import load_config
from dlrover.roles.coordinator.journal import RolesJournal
from dlrover.roles.coordinator.shell import Coordinator
from dlrover.roles.spec import RolesConfig
from dlrover.rpc.server import Server
from dlrover.spec.jobdir import JobDir, MasterAddress
from dlrover.spec.outcome import Outcome

logger = logging.getLogger(__name__)

STOP_GRACE = 1.0
"""Seconds that open calls get to finish when the coordinator exits."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the coordinator of one job of several roles until the job ends; return the job's exit code."""
    parser = argparse.ArgumentParser(prog="python -m dlrover.roles", description=main.__doc__)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--lifeline-fd", type=int, default=-1, help="Leave when it closes.")
    args = parser.parse_args(argv)
    job_dir = JobDir(args.job_dir)
    env = config.environ()
    logs.log_to(job_dir.path / "coordinator.log")
    try:
        return asyncio.run(serve(job_dir, env, args.lifeline_fd))
    except DLRoverError as error:
        logger.exception("The coordinator ends")
        # Trying again would fail in the same way.
        if not job_dir.master.exists() or isinstance(error, DamagedJournalError):
            outcome = Outcome(exit_code=error.exit_code, reason=str(error))
            files.write_atomically(job_dir.outcome, msgspec.json.encode(outcome))
        return error.exit_code


async def serve(job_dir: JobDir, env: Mapping[str, str], lifeline_fd: int) -> int:
    """Serve one job until it and all its roles have ended; return its exit code."""
    settings = load_config(job_dir)
    orphaned = asyncio.Event()
    if lifeline_fd >= 0:
        procs.Lifeline.watch(lifeline_fd, orphaned.set)
    journal = RolesJournal(job_dir.journal)
    history = History(job_dir.events)
    with contextlib.closing(journal), contextlib.closing(history):
        clock = clocks.kept_in(job_dir.clock)
        coordinator = Coordinator(job_dir, settings, journal, history, env, lifeline_fd, clock)
        server = Server(read_token(job_dir), settings.tls, program="coordinator")
        coordinator.register(server)
        port = await _listen(server, job_dir, settings)
        address = MasterAddress(f"{settings.host}:{port}", os.getpid())
        files.write_atomically(job_dir.master, msgspec.json.encode(address))
        coordinator.begin(address.address, settings.address)
        try:
            async with liveness.answering(port):
                outcome = await _until_ended(coordinator, orphaned)
        finally:
            coordinator.close()
            await server.stop(STOP_GRACE)
    if outcome is None:
        return ExitCode.INFRASTRUCTURE
    files.write_atomically(job_dir.outcome, msgspec.json.encode(outcome))
    return outcome.exit_code


async def _listen(server: Server, job_dir: JobDir, settings: RolesConfig) -> int:
    """Listen on the last coordinator's port, where the processes of roles look for it."""
    last = settings.port
    if job_dir.master.exists():
        address = decoding.json(job_dir.master.read_bytes(), MasterAddress).address
        last = int(address.rpartition(":")[2])
    try:
        return await server.start(settings.host, last)
    except InfrastructureError as error:
        if not last or settings.platform != "local":  # other machines would not learn of it
            raise
        logger.warning("%s It listens elsewhere.", error)
        return await server.start(settings.host, 0)


async def _until_ended(coordinator: Coordinator, orphaned: asyncio.Event) -> Outcome | None:
    """Return the job's outcome; None if the process died that keeps the coordinator alive."""
    ended = asyncio.ensure_future(coordinator.ended)
    owner_died = asyncio.ensure_future(orphaned.wait())
    both: list[asyncio.Future[Any]] = [ended, owner_died]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    owner_died.cancel()
    return ended.result() if ended.done() else None
