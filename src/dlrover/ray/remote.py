"""A job of a Ray cluster as seen from outside: its start, and a job directory with copies of its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dlrover import config
from dlrover._util import files
from dlrover.errors import ConfigurationError
from dlrover.ray import cluster
from dlrover.ray.machine import job as jobs
from dlrover.spec.jobdir import JobDir, MasterAddress

ANSWER_TIMEOUT = 60.0
"""Seconds allowed for a master actor to come back before a command gives up."""
START_TIMEOUT = 300.0
"""Seconds allowed for a master actor to start: Ray may have to copy a directory before."""


def start(job: jobs.RayJob) -> Any:
    """Start a job's master actor in the connected cluster; return its handle, also if it runs already.

    Raises:
        ConfigurationError: the cluster can never run the job, or another job has its name.
    """
    from dlrover.ray.master import CALLS, MasterActor  # noqa: PLC0415 - needs the extra

    name = jobs.master_name(job.name)
    taken = ConfigurationError(
        f"The Ray cluster already runs a job named {job.name}; --rdzv-id (metadata.name of a manifest) "
        "names another one."
    )
    if cluster.actor(name) is not None:
        running = master_of(job)
        if running is None:
            raise taken
        return running
    cluster.check_room(job)
    cluster.forget_record(job.name)
    options = MasterActor.options(  # type: ignore[attr-defined]
        name=name,
        namespace=jobs.NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=CALLS,
        num_cpus=0,
    )
    try:
        made = options.remote(jobs.encode(job))
    except ValueError as error:  # another command has taken the name just now
        raise taken from error
    cluster.answer(made.token.remote, START_TIMEOUT)
    return made


def master_of(job: jobs.RayJob, timeout: float = ANSWER_TIMEOUT) -> Any:
    """Return the handle of a job's master actor; None if it is gone, also where another job of its name runs by now.

    Raises:
        InfrastructureError: it does not answer within ``timeout`` seconds.
    """
    found = cluster.actor(jobs.master_name(job.name))
    if found is None or cluster.answer(found.token.remote, timeout) != job.token:
        return None
    return found


def copy(env: Mapping[str, str], job: str, address: str) -> JobDir:
    """Return a job directory with copies of a job's files, through which commands also reach its master.

    Args:
        env: Environment of the command.
        job: Name of the job, or the beginning of it up to a hyphen; empty: the only one that runs.
        address: Address of the cluster.

    Raises:
        ConfigurationError: there is no such job, or no cluster, or the name may mean different jobs.
    """
    cluster.connect(address)
    name, running = _choose(job, [jobs.job_of(n) for n in cluster.names() if jobs.job_of(n)])
    actor = cluster.actor(jobs.master_name(name)) if running else None
    found = JobDir(config.state_dirs(env)[0] / "ray" / jobs.directory_of(name))
    found.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if actor is None:
        content = cluster.record(name) or {}
    else:
        from dlrover.ray.tunnel import Tunnel  # noqa: PLC0415

        known = MasterAddress(Tunnel(jobs.master_name(name)).address, 0)
        content = {
            **cluster.answer(actor.files.remote, ANSWER_TIMEOUT),
            found.token.name: cluster.answer(actor.token.remote, ANSWER_TIMEOUT).encode(),
            found.master.name: msgspec.json.encode(known),
        }
    write(found, content)
    for path in found.path.iterdir():  # another command may be doing the same
        if path.name not in content and not path.name.startswith("."):
            path.unlink(missing_ok=True)
    return found


def write(job_dir: JobDir, content: Mapping[str, bytes]) -> None:
    """Write copies of a job's files into a job directory."""
    for name, data in content.items():
        files.write_atomically(job_dir.path / Path(name).name, data, mode=0o600)


def _choose(job: str, running: list[str]) -> tuple[str, bool]:
    """Return the full name of a job, and whether it runs."""
    if not job:
        if len(running) == 1:
            return running[0], True
        named = ", ".join(sorted(running)) or "none"
        raise ConfigurationError(f"Name a job of the Ray cluster; those that run are: {named}.")
    ended = cluster.records()
    for names, runs in ((running, True), (ended, False)):
        if found := jobs.meant(job, names):
            return found, runs
    named = ", ".join(sorted({*running, *ended})) or "none"
    raise ConfigurationError(f"Job {job} is not in the Ray cluster; its jobs are: {named}.")
