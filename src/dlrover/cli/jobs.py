"""Job directories: made for a new job, found for a running or ended one."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from dlrover import config
from dlrover._util import files
from dlrover.errors import ConfigurationError
from dlrover.rpc import wire
from dlrover.rpc.client import MasterClient
from dlrover.spec.jobdir import JobDir, MasterAddress, MasterConfig

LAST = "last"
"""The link to the job directory that was made or used last."""


def job_name(run_id: str, target: str) -> str:
    """The name of a job: its run id, or what it runs if nobody gave one."""
    stem = Path(target).stem or "job"
    given = run_id not in ("", "none") and len(run_id) <= 63
    return run_id if given else stem


def create(env: Mapping[str, str], name: str, path: str) -> JobDir:
    """The directory for a new run: ``path``, or a fresh one in the user's state directory.

    What an earlier run in the same directory left of its state is put aside, its logs stay.

    Raises:
        ConfigurationError: the directory cannot be made or written to.
    """
    state = config.state_dir(env)
    if not path:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = str(state / "jobs" / f"{_safe(name)}-{stamp}-{secrets.token_hex(2)}")
    job_dir = JobDir(Path(path).absolute())
    try:
        job_dir.path.mkdir(parents=True, exist_ok=True)
        job_dir.lock.touch()
    except OSError as error:
        raise ConfigurationError(
            f"--job-dir {path} cannot be used: {error.strerror}; it takes a directory to write to."
        ) from error
    _remember(state, job_dir)
    return job_dir


@contextlib.contextmanager
def locked(job_dir: JobDir, *, resume: bool = False) -> Iterator[None]:
    """Hold a job directory for one launcher.

    The state of an earlier run is put aside, unless it is to be resumed.

    Raises:
        ConfigurationError: another launcher holds it.
    """
    with job_dir.lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"--job-dir {job_dir.path}: another dlrover-run uses it (process {file.read().strip()})."
            ) from error
        if not resume:
            _put_aside(job_dir)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _put_aside(job_dir: JobDir) -> None:
    """Move the last run's journal, events and outcome into ``run-<n>``: a run starts with none."""
    state = [
        job_dir.job, job_dir.agent, job_dir.token, job_dir.master, job_dir.events, job_dir.outcome,
        job_dir.left, *_journal_files(job_dir), *job_dir.path.glob("*.log"),
    ]  # fmt: skip
    present = [path for path in state if path.exists()]
    if not present:
        return
    number = 1 + len(list(job_dir.path.glob("run-*")))
    target = job_dir.path / f"run-{number}"
    target.mkdir()
    for path in present:
        shutil.move(path, target / path.name)


def _journal_files(job_dir: JobDir) -> list[Path]:
    """The files of the last run's journal, which may be elsewhere."""
    journal = job_dir.journal
    with contextlib.suppress(OSError, msgspec.DecodeError):
        url = msgspec.json.decode(job_dir.job.read_bytes(), type=MasterConfig).journal
        elsewhere = url.removeprefix("file:")
        journal = Path(elsewhere) if url.startswith("file:") and elsewhere else journal
    return sorted(journal.parent.glob(f"{glob.escape(journal.name)}*"))


def write_token(job_dir: JobDir, token: str) -> None:
    """Keep the job's token where only its owner can read it."""
    files.write_atomically(job_dir.token, token.encode(), mode=0o600)


def kept_token(job_dir: JobDir) -> str:
    """The token that a job directory holds; empty if it holds none."""
    return job_dir.token.read_text().strip() if job_dir.token.exists() else ""


def shared_token(env: Mapping[str, str], run_id: str) -> tuple[str, str]:
    """The token of a job whose nodes are started one by one, and a notice if it is guessable."""
    if env.get("DLROVER_TOKEN"):
        return env["DLROVER_TOKEN"], ""
    derived = hashlib.sha256(f"dlrover rdzv-id {run_id}".encode()).hexdigest()[:32]
    return derived, (
        "The nodes of this job know each other by --rdzv-id alone; on a network that others use, set "
        "DLROVER_TOKEN to the same secret on every node."
    )


def find(env: Mapping[str, str], job: str, path: str) -> JobDir:
    """The directory of an existing job: ``path``, the one of the job called ``job``, or the last one.

    Raises:
        ConfigurationError: there is none, or the name fits several.
    """
    state = config.state_dir(env)
    chosen = Path(path or env.get("DLROVER_JOB_DIR", "")) if path or not job else None
    if job:
        chosen = _by_name(state, job)
    elif chosen is None or str(chosen) == ".":
        chosen = state / LAST
        if not chosen.exists():
            raise ConfigurationError(
                f"No job was found in {state}; name a job, or give its --job-dir."
            )
    assert chosen is not None
    found = JobDir(chosen.resolve())
    if not (found.job.exists() or found.journal.exists() or found.agent.exists()):
        raise ConfigurationError(f"--job-dir {chosen}: there is no job in this directory.")
    return found


def connect(job_dir: JobDir) -> MasterClient:
    """A connection to a job's master.

    Raises:
        ConfigurationError: the directory does not say where the master is.
    """
    try:
        address = msgspec.json.decode(job_dir.master.read_bytes(), type=MasterAddress).address
        token = job_dir.token.read_text().strip()
        tls = msgspec.json.decode(job_dir.job.read_bytes(), type=MasterConfig).tls
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"{job_dir.path} does not say where its job's master is: {error}."
        ) from error
    return MasterClient(address, token, wire.Tls(tls.cert, tls.key, tls.ca, tls.server_name))


def _by_name(state: Path, job: str) -> Path:
    jobs = state / "jobs"
    found = sorted(p for p in jobs.glob("*") if p.name == job or p.name.startswith(f"{job}-"))
    if not found:
        raise ConfigurationError(f"Job {job} was not found in {jobs}.")
    # Names end in the time of their start: the last one is the newest.
    return found[-1]


def _remember(state: Path, job_dir: JobDir) -> None:
    """Point the link at a job; another user's or a read-only state directory is no reason to fail."""
    with contextlib.suppress(OSError):
        state.mkdir(parents=True, exist_ok=True)
        temporary = state / f".{LAST}.{os.getpid()}"
        temporary.symlink_to(job_dir.path)
        temporary.replace(state / LAST)


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
