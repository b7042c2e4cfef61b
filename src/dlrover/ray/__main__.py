"""The foreground's end of a job on Ray: ``python -m dlrover.ray --job-dir DIR``.

It starts the master actor, shows the workers' output, copies the job's events and its outcome into the job directory, and
ends the job when its lifeline closes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dlrover._util import decoding, files, logs
from dlrover.errors import DLRoverError, ExitCode
from dlrover.ray import cluster, remote
from dlrover.ray.machine import job as jobs
from dlrover.spec.jobdir import JobDir, MasterAddress
from dlrover.spec.outcome import Outcome

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
    try:
        job = jobs.decode((job_dir.path / jobs.FILE).read_bytes())
        cluster.connect(job.address, job.working_dir)
        remote.start(job)
    except DLRoverError as error:
        outcome = Outcome(exit_code=error.exit_code, reason=str(error))
        files.write_atomically(job_dir.outcome, msgspec.json.encode(outcome))
        return error.exit_code
    name = jobs.master_name(job.name)
    if args.lifeline_fd >= 0:
        threading.Thread(target=_guard, args=(args.lifeline_fd, name), daemon=True).start()
    return _follow(job_dir, name, shown)


def _keep_streams(log: Path) -> dict[int, BinaryIO]:
    """Return standard output and error for the workers' output; what Ray prints itself goes to the log."""
    shown: dict[int, BinaryIO] = {fd: os.fdopen(os.dup(fd), "wb") for fd in (1, 2)}
    with log.open("ab") as file:
        for fd in shown:
            os.dup2(file.fileno(), fd)
    return shown


def _guard(fd: int, name: str) -> None:
    """End the job when the command that started this process dies."""
    os.read(fd, 1)  # nothing is ever written
    actor = cluster.actor(name)
    if actor is not None:
        with contextlib.suppress(DLRoverError):
            cluster.answer(actor.abandon.remote, ABANDON_TIMEOUT)
    os._exit(ExitCode.INFRASTRUCTURE)


def _follow(job_dir: JobDir, name: str, shown: Mapping[int, BinaryIO]) -> int:
    """Show the job until it ends; return its exit code."""
    import ray  # noqa: PLC0415 - after the check that it is installed

    from dlrover.ray.tunnel import Tunnel  # noqa: PLC0415

    known = MasterAddress(Tunnel(name).address, os.getpid())
    files.write_atomically(job_dir.master, msgspec.json.encode(known))
    while (actor := cluster.actor(name)) is not None:
        try:
            if _is_over(job_dir, actor, shown):
                remote.write(job_dir, ray.get(actor.files.remote()))
                ray.get(actor.dismiss.remote())
                break
        except ray.exceptions.RayError:
            time.sleep(RETRY_DELAY)  # noqa: TID251 - nothing else to do
    with contextlib.suppress(FileNotFoundError):
        return decoding.json(job_dir.outcome.read_bytes(), Outcome).exit_code
    outcome = Outcome(
        exit_code=ExitCode.INFRASTRUCTURE,
        reason="The job's master actor was killed for good; Ray starts it no more.",
    )
    files.write_atomically(job_dir.outcome, msgspec.json.encode(outcome))
    return outcome.exit_code


def _is_over(job_dir: JobDir, actor: Any, shown: Mapping[int, BinaryIO]) -> bool:
    """Show what is new; return whether the job has ended and all of its output is shown."""
    import ray  # noqa: PLC0415

    position = job_dir.events.stat().st_size if job_dir.events.exists() else 0
    chunks, happened, over = ray.get(actor.news.remote(position))
    for stream, data in chunks:
        shown[stream].write(data)
        shown[stream].flush()
    if happened:
        with job_dir.events.open("ab") as file:
            file.write(happened)
    return over and not chunks and not happened


if __name__ == "__main__":
    sys.exit(main())
