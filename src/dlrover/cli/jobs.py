"""Job directories: create one for a new job, find that of a running or ended one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import io
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from dlrover import config
from dlrover._util import decoding, files
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError, kind_of
from dlrover.spec.job import Limits
from dlrover.spec.jobdir import (
    OUTCOME_ROOM,
    ConfigHeader,
    JobDir,
    check_format,
)
from dlrover.spec.words import did_you_mean

logger = logging.getLogger(__name__)

LAST = "last"
"""Name of the link to the job directory that was last made or used."""
_START = r"-\d{8}-\d{6}-[0-9a-f]{4}"
"""End of a job directory's name: the start time and a random number."""
LOCK_RETRY = 1.0
"""Seconds between attempts to lock a job directory that a process of another machine holds."""
_LIMITS = {*files.NO_ROOM, errno.EROFS}
"""Errors of a volume that is full, or that has become read-only, as after an error of its disk."""


def job_name(run_id: str, target: str) -> str:
    """Return a job's name: its run id if given and at most 63 characters long, else its program's name."""
    stem = Path(target).stem or "job"
    given = run_id not in ("", "none") and len(run_id) <= 63
    return run_id if given else stem


def create(env: Mapping[str, str], name: str, path: str) -> JobDir:
    """Make the directory for a new run: ``path``, or a new one in the user's state directory.

    `locked` moves the files of an earlier run into ``run-<n>``.

    Raises:
        ConfigurationError: the directory cannot be made or written to.
        InfrastructureError: its volume fails.
    """
    if path:
        job_dir = JobDir(Path(path).absolute())
        try:
            _make(job_dir)
        except OSError as error:
            raise _unusable(job_dir, error) from error
        _remember(config.state_dirs(env)[0], job_dir)
        return job_dir
    return _create_fresh(env, name)


def _create_fresh(env: Mapping[str, str], name: str) -> JobDir:
    """Make a new job directory below the first writable state directory."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    fresh = f"{_safe(name)}-{stamp}-{secrets.token_hex(2)}"
    state, path = config.in_state_dir(
        env, lambda state: _make(JobDir(state.absolute() / "jobs" / fresh)), "--job-dir"
    )
    _remember(state, JobDir(path))
    return JobDir(path)


def _make(job_dir: JobDir) -> Path:
    job_dir.path.mkdir(parents=True, exist_ok=True)
    job_dir.lock.touch()
    return job_dir.path


@contextlib.contextmanager
def locked(
    job_dir: JobDir,
    *,
    resume: bool = False,
    patience: float = Limits().master_timeout,
    waiting: Callable[[str], None] = logger.warning,
) -> Iterator[None]:
    """Hold a job directory for one launcher.

    The files of an earlier run move into ``run-<n>`` unless ``resume`` is set: then only the outcome goes. Space for
    the next one is reserved now, because the disk may be full at the end.

    If a process of another machine holds it, the lock is waited for, at most ``patience`` seconds: a file server keeps
    that of a lost machine for some time. ``waiting`` is called once, with a sentence about it.

    Raises:
        ConfigurationError: another launcher of this machine holds it, it cannot be written to, or ``resume`` is set
            and another version of DLRover began the job.
        InfrastructureError: its volume fails, or a process of another machine holds it for longer than ``patience``.
    """
    outcomes = (job_dir.outcome, job_dir.left)
    with _opened(job_dir) as file:
        try:
            _lock(job_dir, file, patience, waiting)
            if resume:
                _check_format(job_dir)
                # It may be of a master that could not begin; if the job has ended, its journal says so.
                job_dir.outcome.unlink(missing_ok=True)
            else:
                _archive(job_dir)
            for path in outcomes:
                files.reserve(path, OUTCOME_ROOM)
            file.truncate(0)
            file.seek(0)
            file.write(f"{os.getpid()} of {socket.gethostname()}".encode())
        except OSError as error:
            raise _unusable(job_dir, error) from error
        try:
            yield
        finally:
            for path in outcomes:
                files.release(path)


def _opened(job_dir: JobDir) -> io.FileIO:
    try:
        return job_dir.lock.open("r+b", buffering=0)
    except OSError as error:
        raise _unusable(job_dir, error) from error


def _lock(
    job_dir: JobDir, file: io.FileIO, patience: float, waiting: Callable[[str], None]
) -> None:
    """Lock the file; wait for a lock that no process of this machine holds."""
    until, waits = time.monotonic() + patience, False
    while not _try_to_lock(file):
        file.seek(0)
        process = file.read().decode(errors="replace").strip()
        if _is_held_here(file):
            raise ConfigurationError(
                f"--job-dir {job_dir.path}: another dlrover-run uses it (process {process})."
            )
        if time.monotonic() >= until:
            raise InfrastructureError(
                f"--job-dir {job_dir.path}: a process of another machine or container (process {process}) has held it "
                f"for {patience:g} s; end that process, or give another directory."
            )
        if not waits:
            waiting(
                f"--job-dir {job_dir.path}: a process of another machine or container (process {process}) holds it; if "
                "that machine is lost, its file server frees it after a while. It is waited for, at most "
                f"{patience:g} s."
            )
        waits = True
        time.sleep(LOCK_RETRY)  # noqa: TID251 - nothing announces that a server frees a lock


def _try_to_lock(file: io.FileIO) -> bool:
    """Lock a file; return whether that succeeded."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_held_here(file: io.FileIO) -> bool:
    """Return whether a visible process of this machine holds the lock of a file (proc_locks(5))."""
    # Only the inode: some file systems, such as overlayfs, have another device there.
    number = os.fstat(file.fileno()).st_ino
    with contextlib.suppress(OSError):
        lines = Path("/proc/locks").read_text().splitlines()
        return any(re.search(rf" FLOCK .*:{number} ", line) for line in lines)
    return False


def _unusable(job_dir: JobDir, error: OSError) -> DLRoverError:
    """Return the error of a directory that cannot be used: where a job has begun, it was the right one."""
    limited = error.errno in _LIMITS and _holds_job(job_dir)
    kind = InfrastructureError if limited else kind_of(error)
    return kind(
        f"--job-dir {job_dir.path} cannot be used: {error.strerror}; it takes a directory to write to."
    )


def _check_format(job_dir: JobDir) -> None:
    """Refuse a job that another version of DLRover began: this version would misread parts of it.

    Raises:
        FormatError: the job's configuration has another format.
    """
    for path in (job_dir.job, job_dir.agent):
        # Absent, or damaged: its reader reports that.
        with contextlib.suppress(OSError, msgspec.DecodeError):
            check_format(path, decoding.json(path.read_bytes(), ConfigHeader).format)


def _archive(job_dir: JobDir) -> None:
    """Move the last run's journal, events, outcome and top-level logs into ``run-<n>``."""
    # The job's file last: if a move fails, the next attempt finds the journal by it.
    state = [
        *_journal_files(job_dir), job_dir.agent, job_dir.token, job_dir.master, job_dir.events,
        job_dir.clock, job_dir.checkpoints, job_dir.outcome, job_dir.left, job_dir.roles, *job_dir.path.glob("*.log"),
        job_dir.job,
    ]  # fmt: skip
    present = [path for path in state if path.exists()]
    if not present:
        return
    numbers = [path.name.removeprefix("run-") for path in job_dir.path.glob("run-*")]
    last = max((int(number) for number in numbers if number.isdecimal()), default=0)
    target = job_dir.path / f"run-{last + 1}"
    target.mkdir()
    for path in present:
        shutil.move(path, target / path.name)


def _journal_files(job_dir: JobDir) -> list[Path]:
    """Return the files of the last run's journal, which may be in another directory."""
    journal = job_dir.journal
    with contextlib.suppress(OSError, msgspec.DecodeError):
        url = decoding.json(job_dir.job.read_bytes(), ConfigHeader).journal
        elsewhere = url.removeprefix("file:")
        journal = Path(elsewhere) if url.startswith("file:") and elsewhere else journal
    return sorted(journal.parent.glob(f"{glob.escape(journal.name)}*"))


def write_token(job_dir: JobDir, token: str) -> None:
    """Write the job's token so that only its owner can read it.

    Raises:
        ConfigurationError: the token is not valid, or the file cannot be written.
        InfrastructureError: its volume fails.
    """
    from dlrover.rpc.wire import checked_token  # noqa: PLC0415 - loads grpc

    write(job_dir, job_dir.token, checked_token(token).encode())


def write(job_dir: JobDir, path: Path, data: bytes) -> None:
    """Write a file of a job directory that only its owner can read.

    Raises:
        ConfigurationError: the file cannot be written.
        InfrastructureError: its volume fails.
    """
    try:
        files.write_atomically(path, data, mode=0o600)
    except OSError as error:
        raise _unusable(job_dir, error) from error


def kept_token(job_dir: JobDir) -> str:
    """Return the token in a job directory; empty if there is none."""
    try:
        return job_dir.token.read_text().strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise _unusable(job_dir, error) from error


def shared_token(env: Mapping[str, str], run_id: str, host: str, port: int) -> str:
    """Return the token of a job whose nodes are started one by one and meet at an endpoint.

    Nodes that meet at an address of their own machine share a file that the first one makes.

    Raises:
        ConfigurationError: nodes of several machines have no token.
    """
    from dlrover.cli.host import network  # noqa: PLC0415 - only here: psutil is slow to import

    given = given_token(env)
    if given:
        return given
    if not network.stays_here(host):
        raise ConfigurationError(
            f"DLROVER_TOKEN is not set: nodes that meet at {host} need a secret in common. Set it to the same "
            "value on each machine; openssl rand -hex 16 makes one."
        )
    name = Path("tokens") / f"{_safe(run_id)[:100]}-{port}"
    path = config.in_state_dir(env, lambda state: _with_token(state / name), "DLROVER_TOKEN")[1]
    return path.read_text()


def given_token(env: Mapping[str, str]) -> str:
    """Return the token that the user set; empty if not set."""
    return env.get("DLROVER_TOKEN", "").strip()


def _with_token(path: Path) -> Path:
    """Return ``path``; if it does not exist, write a new token to it first."""
    if path.exists():  # write nothing: the disk may be full by now
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    files.write_atomically(fresh, secrets.token_hex(16).encode(), mode=0o600)
    with contextlib.suppress(FileExistsError):
        os.link(fresh, path)  # another node was first
    fresh.unlink()
    return path


def find(env: Mapping[str, str], job: str, path: str) -> JobDir:
    """Return the directory of the job named ``job``, else ``path`` or ``DLROVER_JOB_DIR``, else the last one.

    Raises:
        ConfigurationError: there is no such job, or another version of DLRover began it.
    """
    states = config.state_dirs(env)
    state = max(states, key=_used)
    chosen = Path(path or env.get("DLROVER_JOB_DIR", "")) if path or not job else None
    if job:
        chosen = _by_name(states, job)
    elif chosen is None or str(chosen) == ".":
        chosen = state / LAST
        if not chosen.exists():
            raise ConfigurationError(
                f"No job was found in {state}; name a job, or give its --job-dir."
            )
        if not _holds_job(JobDir(chosen)):  # the last one could not begin
            earlier = filter(lambda path: _holds_job(JobDir(path)), (state / "jobs").glob("*"))
            chosen = max(earlier, key=lambda path: path.stat().st_mtime, default=chosen)
    assert chosen is not None
    found = JobDir(Path(os.path.realpath(chosen)))
    if not _holds_job(found):
        raise ConfigurationError(_absence(chosen))
    _check_format(found)
    return found


def _holds_job(place: JobDir) -> bool:
    return any(path.exists() for path in (place.job, place.journal, place.agent, place.roles))


def _absence(path: Path) -> str:
    """Return why there is no job in ``path``, with the nearest job directory beside it if it does not exist."""
    if path.exists():
        return f"--job-dir {path}: there is no job in this directory."
    beside = [each.parent.name for each in path.parent.glob(f"*/{JobDir(path).job.name}")]
    hint = did_you_mean(path.name, beside, before=f"{path.parent}{os.sep}")
    return f"--job-dir {path}: there is no such directory.{hint}"


def find_on(platform: str, ray_address: str, env: Mapping[str, str], job: str, path: str) -> JobDir:
    """Return the directory of a job: of this machine, as `find` does, or with copies of a Ray cluster's.

    Raises:
        ConfigurationError: there is no such job, platform or cluster.
    """
    if platform not in ("", "ray"):
        raise ConfigurationError(f"--platform {platform}: must be ray, or empty for this machine.")
    if not platform:
        if ray_address:
            raise ConfigurationError(f"--ray-address {ray_address}: needs --platform ray.")
        return find(env, job, path)
    if path:
        raise ConfigurationError(f"--job-dir {path}: excludes --platform ray; name the job.")
    from dlrover.ray import remote  # noqa: PLC0415 - an extra

    return remote.copy(env, job, ray_address or env.get("RAY_ADDRESS", ""))


def _used(state: Path) -> float:
    """Return when a state directory was last used for a job; 0.0 if never."""
    try:
        return (state / LAST).lstat().st_mtime
    except OSError:
        return 0.0


def _by_name(states: Sequence[Path], job: str) -> Path:
    places = [state / "jobs" for state in states]
    own = re.compile(rf"{re.escape(_safe(job))}({_START})?")
    found = [p for jobs in places for p in jobs.glob("*") if own.fullmatch(p.name)]
    if not found:
        names = {re.sub(f"{_START}$", "", p.name) for jobs in places for p in jobs.glob("*")}
        hint = did_you_mean(job, names)
        given = "; if it was started with --job-dir, give that" if not hint else ""
        raise ConfigurationError(f"Job {job} was not found in {places[0]}{given}.{hint}")
    # Names end in the job's start time: the last one is the newest.
    return max(found, key=lambda path: path.name)


def _remember(state: Path, job_dir: JobDir) -> None:
    """Point the link at a job; ignore a state directory that is read-only or another user's."""
    with contextlib.suppress(OSError):
        state.mkdir(parents=True, exist_ok=True)
        temporary = state / f".{LAST}.{os.getpid()}"
        temporary.symlink_to(job_dir.path)
        temporary.replace(state / LAST)


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
