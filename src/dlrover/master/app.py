"""The master process: ``python -m dlrover.master --job-dir DIR``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import logging
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dlrover import config, extras
from dlrover._util import clocks, decoding, files, logs, procs, tasks
from dlrover.errors import (
    ConfigurationError,
    DamagedJournalError,
    DLRoverError,
    ExitCode,
    FormatError,
    InfrastructureError,
)
from dlrover.master import liveness
from dlrover.master.files import load_config, read_token
from dlrover.master.journal.history import History
from dlrover.master.journal.journal import DEFAULT, Journal, open_journal
from dlrover.master.machine import inputs
from dlrover.master.scaling import brainside
from dlrover.master.scaling.brainside import JobBrain
from dlrover.master.service import JOURNAL_RETRY, Master
from dlrover.master.views.observers import Observers
from dlrover.platform.base import Platform, Setup, platform_class
from dlrover.rpc.server import Server
from dlrover.spec.jobdir import JobDir, MasterAddress, MasterConfig, TlsFiles
from dlrover.spec.outcome import Outcome

logger = logging.getLogger(__name__)

GC_THRESHOLDS = 50_000, 20, 50
"""Garbage collection of the master: thousands of agents that arrive are no garbage, and each collection visits them."""
STOP_GRACE = 1.0
"""Seconds that open calls get to finish when the master exits; it has closed the agents' streams by then."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the master of one job until the job ends; return the job's exit code."""
    parser = argparse.ArgumentParser(prog="python -m dlrover.master", description=main.__doc__)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--stderr", action="store_true", help="Write the log there, too.")
    parser.add_argument("--lifeline-fd", type=int, default=-1, help="Leave when it closes.")
    args = parser.parse_args(argv)
    job_dir = JobDir(args.job_dir)
    env = config.environ()
    logs.log_to(job_dir.master_log)
    shown = logging.StreamHandler()
    shown.setLevel(logging.DEBUG if args.stderr else logging.CRITICAL)
    shown.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
    logging.getLogger().addHandler(shown)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request
    try:
        gc.freeze()  # what is imported stays, and the process's end need not look at it
        gc.set_threshold(*GC_THRESHOLDS)
        return asyncio.run(serve(job_dir, env, args.lifeline_fd))
    except DLRoverError as error:
        logger.exception("The master ends")
        never_served = not job_dir.master.exists()
        # Trying again would fail in the same way.
        if never_served or isinstance(error, FormatError):
            outcome = Outcome(exit_code=error.exit_code, reason=str(error))
            files.write_atomically(job_dir.outcome, msgspec.json.encode(outcome))
        return error.exit_code


async def serve(job_dir: JobDir, env: Mapping[str, str], lifeline_fd: int) -> int:
    """Serve one job until it has ended and its nodes have left; nodes launched here inherit ``env``."""
    settings = load_config(job_dir)
    if settings.job.auto_scale:
        extras.require("Auto-scaling", "planning", extras.PLANNING)
    orphaned = asyncio.Event()
    if lifeline_fd >= 0:
        procs.Lifeline.watch(lifeline_fd, orphaned.set)
    try:
        _check_journal(settings, job_dir)
        journal, history, master = await _restored(settings, job_dir, orphaned)
    except DamagedJournalError as error:
        if not job_dir.master.exists():
            raise
        aside = _set_aside(error.path)
        logger.critical(
            "%s It is kept as %s, and the job goes on with what its agents know.", error, aside
        )
        journal, history, master = await _restored(settings, job_dir, orphaned)
    with contextlib.closing(journal), contextlib.closing(history):
        observers = Observers(master, history, settings.metrics, env)
        try:
            return await _serve(master, history, settings, job_dir, env, lifeline_fd, orphaned)
        finally:
            await asyncio.to_thread(observers.close)


async def _restored(
    settings: MasterConfig, job_dir: JobDir, orphaned: asyncio.Event
) -> tuple[Journal, History, Master]:
    """Open the journal and the events, and replay them into a master.

    Raises:
        DamagedJournalError: the journal cannot be read.
        InfrastructureError: it cannot be opened.
    """
    with contextlib.ExitStack() as opened:
        journal = opened.enter_context(
            contextlib.closing(await _opened(settings, job_dir, orphaned))
        )
        history = opened.enter_context(contextlib.closing(History(job_dir.events)))
        master = Master(journal, history, clocks.kept_in(job_dir.clock))
        opened.pop_all()
        return journal, history, master


def _set_aside(path: str) -> str:
    """Rename a journal's files, so that the next one is new; return the name of the first."""
    names = (f"{path}.damaged-{number}" for number in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    for suffix in ("", "-wal", "-shm"):  # SQLite would read those of the old file for the new one
        with contextlib.suppress(FileNotFoundError):
            os.rename(path + suffix, aside + suffix)
    return aside


async def _opened(settings: MasterConfig, job_dir: JobDir, orphaned: asyncio.Event) -> Journal:
    """Open the journal; a master that takes over waits for room on its disk as long as the agents wait for a master."""
    until, waits = time.monotonic() + settings.job.limits.master_timeout, False
    while True:
        try:
            return open_journal(settings.journal, job_dir.journal)
        except InfrastructureError as error:
            passing = isinstance(error.__cause__, sqlite3.OperationalError)
            late = time.monotonic() >= until or orphaned.is_set()
            if late or not (passing and job_dir.master.exists()):
                raise
            if not waits:
                logger.warning("%s It is tried again each %g s.", error, JOURNAL_RETRY)
            waits = True
        await tasks.signalled(orphaned, JOURNAL_RETRY)


def _check_journal(settings: MasterConfig, job_dir: JobDir) -> None:
    """Refuse a journal elsewhere that is another job's: who opens it to write ends that job's master.

    Raises:
        ConfigurationError: it is.
    """
    if settings.journal == DEFAULT:
        return
    try:
        journal = open_journal(settings.journal, job_dir.journal, read_only=True)
    except InfrastructureError:
        return  # there is none yet, or it cannot be opened to write either
    with contextlib.closing(journal):
        _, first = next(iter(journal.entries()), (0.0, None))
    if not isinstance(first, inputs.Submitted):
        return
    theirs, place = first.job.name, first.job_dir
    if theirs != settings.job.name or not _is_same(place, job_dir.path):
        raise ConfigurationError(
            f"journal {settings.journal}: the file has the state of the job {theirs} in {place}; each job takes a "
            "file of its own."
        )


def _is_same(theirs: str, own: Path) -> bool:
    """Return whether a job directory is this job's, which has its name alone on a machine that the master has left."""
    if os.path.exists(theirs):
        return os.path.realpath(theirs) == os.path.realpath(own)
    return Path(theirs).name == own.name


async def _serve(
    master: Master,
    history: History,
    settings: MasterConfig,
    job_dir: JobDir,
    env: Mapping[str, str],
    lifeline_fd: int,
    orphaned: asyncio.Event,
) -> int:
    tls = settings.tls
    server = Server(read_token(job_dir), tls)
    master.register(server)
    master.services.use_token(read_token(job_dir))
    port = await _listen(server, settings, job_dir)
    _publish(job_dir, settings.host, port)
    nodes_env = {name: value for name, value in env.items() if name != brainside.TOKEN}
    setup = Setup(job_dir.path, port, nodes_env, lifeline_fd, master.platform, settings.node_size)
    platform = await _platform(settings, setup)
    job = settings.job
    brain = _brain(master, settings, job_dir, tls, env)
    if brain is not None:
        history.listeners.append(brain.happened)
        if job.auto_scale and not master.replayed:
            job = await brain.first(job)
    master.begin(job, str(job_dir.path), platform)
    try:
        async with liveness.answering(port):
            outcome = await _until_ended(master, job_dir, orphaned)
        if outcome is None:
            return ExitCode.INFRASTRUCTURE
        if brain is not None:
            brain.ended(outcome)
        return outcome.exit_code
    finally:
        master.close()
        await server.stop(STOP_GRACE)
        if brain is not None:
            await brain.close()
        if platform is not None:
            await platform.close()


def _brain(
    master: Master, settings: MasterConfig, job_dir: JobDir, tls: TlsFiles, env: Mapping[str, str]
) -> JobBrain | None:
    """Return the Brain; None if there is none, or if its token is missing and the job can do without it.

    A job can if it does not auto-scale, or after a takeover.
    """
    secret = f"{read_token(job_dir)} {job_dir.path}"
    try:
        brain = brainside.connect(settings.brain, settings.job, secret, tls, env)
    except (ConfigurationError, InfrastructureError):
        if settings.job.auto_scale and not master.replayed:
            raise
        logger.exception("The job goes on without the Brain")
        return None
    master.scaler.brain = brain
    return brain


def _port(job_dir: JobDir, settings: MasterConfig) -> int:
    """Return the configured port; if there is none, that of the job's last master, where its agents look."""
    if settings.port or not job_dir.master.exists():
        return settings.port
    last = decoding.json(job_dir.master.read_bytes(), MasterAddress)
    return int(last.address.rpartition(":")[2])


async def _listen(server: Server, settings: MasterConfig, job_dir: JobDir) -> int:
    """Listen on the last master's port; on another one if that master is stopped and still holds the port."""
    try:
        return await server.start(settings.host, _port(job_dir, settings))
    except InfrastructureError as error:
        if settings.port:
            raise
        logger.warning("%s It listens elsewhere.", error)
        return await server.start(settings.host, 0)


def _publish(job_dir: JobDir, host: str, port: int) -> None:
    # From this machine, a listener on all addresses is reached via loopback.
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104
    reachable = f"[{reachable}]" if ":" in reachable else reachable
    address = MasterAddress(f"{reachable}:{port}", os.getpid())
    files.write_atomically(job_dir.master, msgspec.json.encode(address))


async def _platform(settings: MasterConfig, setup: Setup) -> Platform | None:
    if not settings.platform:
        return None
    platform: Platform = await platform_class(settings.platform).create(setup)
    return platform


async def _until_ended(master: Master, job_dir: JobDir, orphaned: asyncio.Event) -> Outcome | None:
    """Return the job's outcome, which is also written; None if the master ends before the job."""
    serving = asyncio.create_task(master.run())
    owner_died = asyncio.create_task(orphaned.wait())
    await asyncio.wait([serving, owner_died], return_when=asyncio.FIRST_COMPLETED)
    owner_died.cancel()
    if not (serving.done() or master.ended.is_set()):
        logger.info("The launcher died; so does its master")
        serving.cancel()
        return None
    outcome = master.machine.outcome
    if not await serving or outcome is None:
        return None
    goodput = master.ledger.goodput(master.clock())
    outcome = msgspec.structs.replace(
        outcome, goodput=goodput, skipped=master.services.shards.summary()
    )
    files.write_atomically(job_dir.outcome, msgspec.json.encode(outcome))
    return outcome
