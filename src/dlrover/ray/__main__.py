"""The foreground's end of a job on Ray: ``python -m dlrover.ray --job-dir DIR``.

It starts the master actor, shows the workers' output, copies the job's events and its outcome into the job directory, and
ends the job when its lifeline closes.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dlrover._util import decoding, files, logs
from dlrover.errors import DLRoverError, ExitCode, InfrastructureError
from dlrover.ray import cluster, remote
from dlrover.ray.copying import CopiedEvents
from dlrover.ray.machine import job as jobs
from dlrover.spec.jobdir import JobDir, MasterAddress
from dlrover.spec.outcome import Outcome

logger = logging.getLogger(__name__)

RETRY_DELAY = 0.2
"""Seconds between two attempts to reach a master actor that is being restarted."""
ABANDON_TIMEOUT = 5.0
"""Seconds to tell the master actor that the foreground is gone; else it notices by its silence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job on Ray from the foreground to its end; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m dlrover.ray", description=main.__doc__)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--lifeline-fd", type=int, default=-1, help="End the job when it closes.")
    args = parser.parse_args(argv)
    job_dir = JobDir(args.job_dir)
    log = job_dir.path / "ray.log"
    logs.log_to(log)
    shown = _keep_streams(log)
    # Then an earlier process of the command has started the job, which must not run twice.
    began = job_dir.master.exists()
    try:
        job = jobs.decode((job_dir.path / jobs.FILE).read_bytes())
        cluster.connect(job.address, job.working_dir)
        if not began:
            remote.start(job)
    except DLRoverError as error:
        outcome = Outcome(exit_code=error.exit_code, reason=str(error))
        if began:
            reason = f"The job's Ray cluster is gone: {error}"
            outcome = Outcome(exit_code=ExitCode.INFRASTRUCTURE, reason=reason)
        files.write_atomically(job_dir.outcome, msgspec.json.encode(outcome))
        return outcome.exit_code
    if args.lifeline_fd >= 0:
        threading.Thread(target=_guard, args=(args.lifeline_fd, job), daemon=True).start()
    return _follow(job_dir, job, shown)


def _keep_streams(log: Path) -> dict[int, BinaryIO]:
    """Return standard output and error for the workers' output; what Ray prints itself goes to the log."""
    shown: dict[int, BinaryIO] = {fd: os.fdopen(os.dup(fd), "wb") for fd in (1, 2)}
    with log.open("ab") as file:
        for fd in shown:
            os.dup2(file.fileno(), fd)
    return shown


def _guard(fd: int, job: jobs.RayJob) -> None:
    """End the job when the command that started this process dies."""
    os.read(fd, 1)  # nothing is ever written
    try:
        actor = remote.master_of(job, ABANDON_TIMEOUT)
        if actor is not None:
            cluster.answer(actor.abandon.remote, ABANDON_TIMEOUT)
    finally:
        os._exit(ExitCode.INFRASTRUCTURE)


def _follow(job_dir: JobDir, job: jobs.RayJob, shown: Mapping[int, BinaryIO]) -> int:
    """Show the job until it ends; return its exit code."""
    from dlrover.ray.tunnel import Tunnel  # noqa: PLC0415

    known = MasterAddress(Tunnel(jobs.master_name(job.name)).address, os.getpid())
    files.write_atomically(job_dir.master, msgspec.json.encode(known))
    with contextlib.closing(CopiedEvents(job_dir.events)) as events:
        _until_over(job_dir, job, events, shown)
    with contextlib.suppress(FileNotFoundError):
        return decoding.json(job_dir.outcome.read_bytes(), Outcome).exit_code
    outcome = Outcome(
        exit_code=ExitCode.INFRASTRUCTURE,
        reason="The job's master actor is gone for good: it was killed, or has heard nothing from this command for long.",
    )
    files.write_atomically(job_dir.outcome, msgspec.json.encode(outcome))
    return outcome.exit_code


def _until_over(
    job_dir: JobDir, job: jobs.RayJob, events: CopiedEvents, shown: Mapping[int, BinaryIO]
) -> None:
    """Show the job until it ends, and keep what its master leaves."""
    import ray  # noqa: PLC0415

    while True:
        try:
            actor = remote.master_of(job)
            if actor is None:  # it left while this process was stopped, or was killed
                ended = cluster.record(job.name) or {}
                _keep(job_dir, ended if ended.get(job_dir.token.name) == job.token.encode() else {})
                return
            if _is_over(events, actor, shown):
                _keep(job_dir, ray.get(actor.files.remote()))
                ray.get(actor.dismiss.remote())
                return
        except (ray.exceptions.RayError, InfrastructureError):
            time.sleep(RETRY_DELAY)  # noqa: TID251 - nothing else to do


def _keep(job_dir: JobDir, content: Mapping[str, bytes]) -> None:
    """Write the files of an ended job; on a full disk its outcome alone, for which room is reserved."""
    outcome = job_dir.outcome.name
    rest = {
        name: data for name, data in content.items() if name not in (outcome, job_dir.events.name)
    }
    first = {outcome: content[outcome]} if outcome in content else {}
    for some in (first, rest):
        try:
            remote.write(job_dir, some)
        except OSError as error:
            logger.warning("Not all files of the job could be written: %s", error)


def _is_over(events: CopiedEvents, actor: Any, shown: Mapping[int, BinaryIO]) -> bool:
    """Show what is new; return whether the job has ended and all of its output is shown."""
    import ray  # noqa: PLC0415

    chunks, first, happened, over = ray.get(actor.news.remote(events.of, events.position))
    for stream, data in chunks:
        shown[stream].write(data)
        shown[stream].flush()
    events.add(first, happened)
    return over and not chunks and not happened


if __name__ == "__main__":
    sys.exit(main())
