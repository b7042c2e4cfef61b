"""Job directories: made, locked, put aside, found again."""

import contextlib
import errno
import fcntl
import os
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from dlrover import config
from dlrover.cli import jobs
from dlrover.dashboard.inspect import queries
from dlrover.errors import (
    ConfigurationError,
    ExitCode,
    FormatError,
    InfrastructureError,
    kind_of,
)
from dlrover.master.files import load_config, read_outcome, read_token
from dlrover.roles import client as roles
from dlrover.rpc import wire
from dlrover.rpc.client import connect
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import FORMAT, JobDir, MasterAddress, MasterConfig, TlsFiles
from dlrover.spec.outcome import Outcome


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"DLROVER_STATE_DIR": str(tmp_path / "state")}


def test_a_misspelt_job_dir_is_answered_with_the_nearest_job(env: dict[str, str], tmp_path: Path):
    jobs.create(env, "one", str(tmp_path / "first-job")).job.touch()
    (tmp_path / "first-jb-notes").mkdir()
    asked = tmp_path / "first-jb"
    with pytest.raises(ConfigurationError) as caught:
        jobs.find(env, "", str(asked))
    assert str(caught.value) == (
        f"--job-dir {asked}: there is no such directory. Did you mean {tmp_path / 'first-job'}?"
    )
    with pytest.raises(ConfigurationError, match=r"notes: there is no job in this directory\.$"):
        jobs.find(env, "", f"{asked}-notes")


def test_the_last_job_is_found_without_a_name(env: dict[str, str]):
    first = jobs.create(env, "one", "")
    second = jobs.create(env, "two", "")
    for job in (first, second):
        job.job.touch()
    assert jobs.find(env, "", "").path == second.path
    assert jobs.find(env, "one", "").path == first.path
    assert jobs.find(env, first.path.name, "").path == first.path
    assert jobs.find(env, "", str(first.path)).path == first.path
    assert jobs.find({**env, "DLROVER_JOB_DIR": str(first.path)}, "", "").path == first.path


def test_a_job_that_could_not_begin_is_not_the_last_one(env: dict[str, str]):
    before, last = (jobs.create(env, name, "") for name in ("zeta", "alpha"))
    for age, job in ((200, before), (100, last)):
        job.job.touch()
        os.utime(job.path, (time.time() - age,) * 2)
    jobs.create(env, "on a full disk", "")
    assert jobs.find(env, "", "").path == last.path


def test_a_job_is_not_found_by_the_beginning_of_its_name(env: dict[str, str]):
    own, longer = jobs.create(env, "my job", ""), jobs.create(env, "my job-big", "")
    for job in (own, longer):
        job.job.touch()
    assert jobs.find(env, "my job", "").path == own.path
    with pytest.raises(ConfigurationError, match="Job my was not found"):
        jobs.find(env, "my", "")
    with pytest.raises(ConfigurationError, match=r"Did you mean my_job-big\?"):
        jobs.find(env, "my-jb-big", "")


@pytest.mark.parametrize(
    ("job", "path", "message"),
    [("", "", "No job was found"), ("x", "", "Job x was not found"), ("", "/", "there is no job")],
)
def test_what_is_not_there_is_named(env: dict[str, str], job: str, path: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        jobs.find(env, job, path)


def test_a_directory_that_cannot_be_made(env: dict[str, str]):
    with pytest.raises(ConfigurationError, match="--job-dir /proc/x cannot be used"):
        jobs.create(env, "x", "/proc/x")


def test_names_become_safe_paths(env: dict[str, str]):
    assert "/" not in jobs.create(env, "../../etc", "").path.name
    assert jobs.job_name("none", "dir/train.py") == "train"
    assert jobs.job_name("my-job", "train.py") == "my-job"


def test_the_state_of_an_earlier_run_is_put_aside(env: dict[str, str], tmp_path: Path):
    job = jobs.create(env, "x", str(tmp_path / "job"))
    with jobs.locked(job):
        job.journal.write_text("old")
        job.outcome.write_text("old")
        job.logs.mkdir()
    with jobs.locked(job, resume=True):
        assert job.journal.read_text() == "old"
        assert not job.outcome.exists(), "it may be of a master that could not begin"
        job.outcome.write_text("old")
    with jobs.locked(job):
        assert not job.journal.exists()
        assert job.logs.is_dir()
        assert (job.path / "run-1" / "journal.sqlite").read_text() == "old"
        assert (job.path / "run-1" / "outcome.json").exists()


def test_two_launchers_do_not_share_a_directory(env: dict[str, str], tmp_path: Path):
    job = jobs.create(env, "x", str(tmp_path / "job"))
    code = (
        "import sys; from pathlib import Path; from dlrover.cli import jobs;"
        "from dlrover.spec.jobdir import JobDir\n"
        "with jobs.locked(JobDir(Path(sys.argv[1]))): pass"
    )
    with jobs.locked(job):
        other = subprocess.run(
            [sys.executable, "-c", code, str(job.path)], check=False, capture_output=True, text=True
        )
    assert "another dlrover-run uses it" in other.stderr.splitlines()[-1]


def test_tokens(env: dict[str, str], tmp_path: Path):
    job = jobs.create(env, "x", str(tmp_path / "job"))
    assert jobs.kept_token(job) == ""
    jobs.write_token(job, "secret")
    assert jobs.kept_token(job) == "secret"
    assert stat.S_IMODE(job.token.stat().st_mode) == 0o600


def test_nodes_of_several_machines_need_a_token(env: dict[str, str]) -> None:
    with_token = {**env, "DLROVER_TOKEN": "t"}
    assert jobs.shared_token(with_token, "id", "host0", 29400) == "t"
    for host in ("no-such-host.invalid", "192.0.2.1"):
        with pytest.raises(ConfigurationError, match=r"DLROVER_TOKEN is not set: .* openssl rand"):
            jobs.shared_token(env, "id", host, 29400)


@pytest.mark.parametrize(
    "host", ["LOCALHOST", "0.0.0.0", "::", "127.1.2.3", "::1", "a-name-of-this-machine"]
)
def test_nodes_that_meet_at_an_address_of_their_own_machine_need_none(
    env: dict[str, str], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = next(a for n in psutil.net_if_addrs().values() for a in n if a.family == socket.AF_INET)
    known = {"a-name-of-this-machine": own.address, "LOCALHOST": "127.0.0.1"}

    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (known.get(host, host), port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert len(jobs.shared_token(env, "id", host, 29400)) == 32


def test_without_a_home_nodes_find_their_token_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = {"HOME": "/dev/null"}
    token = jobs.shared_token(env, "id", "localhost", 1)
    assert jobs.shared_token(env, "id", "localhost", 1) == token
    (kept,) = (tmp_path / f"dlrover-{os.getuid()}" / "tokens").iterdir()
    assert kept.read_text() == token
    assert str(kept) in caplog.text
    assert token not in caplog.text


def test_a_directory_that_another_user_has_made_is_given_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "dlrover-4711").mkdir()  # by this user
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(ConfigurationError, match="set DLROVER_TOKEN or DLROVER_STATE_DIR"):
        jobs.shared_token({"HOME": "/dev/null"}, "id", "localhost", 1)
    assert not list((tmp_path / "dlrover-4711").iterdir())


def test_a_token_is_found_on_a_disk_that_has_become_full(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = jobs.shared_token(env, "id", "localhost", 1)
    monkeypatch.setattr(jobs.files, "write_atomically", None)
    assert jobs.shared_token(env, "id", "localhost", 1) == token


def test_nodes_of_one_machine_share_a_token_that_nobody_can_guess(
    env: dict[str, str], tmp_path: Path
) -> None:
    def token(run_id: str, port: int = 1, state: str = "state") -> str:
        place = {"DLROVER_STATE_DIR": str(tmp_path / state)}
        return jobs.shared_token(place, run_id, "localhost", port)

    with ThreadPoolExecutor(8) as nodes:
        (shared,) = set(nodes.map(token, ["a/b"] * 32))
    assert len({shared, token("other"), token("a/b", 2), token("a/b", 1, "elsewhere")}) == 4
    kept = list((tmp_path / "state" / "tokens").iterdir())
    assert len(kept) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


def test_without_a_home_a_job_is_kept_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = {"HOME": "/dev/null"}
    job = jobs.create(env, "one", "")
    job.job.touch()
    assert job.path.is_relative_to(tmp_path / f"dlrover-{os.getuid()}" / "jobs")
    assert stat.S_IMODE((tmp_path / f"dlrover-{os.getuid()}").stat().st_mode) == 0o700
    assert "/dev/null/.local/state/dlrover cannot be written (Not a directory)" in caplog.text
    assert str(job.path) in caplog.text
    assert jobs.find(env, "", "").path == job.path
    assert jobs.find(env, "one", "").path == job.path


def test_a_place_that_was_named_is_not_replaced_by_another() -> None:
    with pytest.raises(
        ConfigurationError, match=r"/dev/null/x cannot be written .*DLROVER_STATE_DIR"
    ):
        jobs.create({"DLROVER_STATE_DIR": "/dev/null/x"}, "x", "")


QUESTIONS = {
    "stacks": queries.stacks,
    "scale": lambda job: queries.scale(job, 2, "why"),
    "stop": lambda job: queries.stop(job, "why"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_to_a_job_that_has_ended_is_answered_in_one_sentence(
    question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "RESTART_TIME", 1.0)
    job = JobDir(tmp_path)
    config = MasterConfig(job=JobSpec(name="job"))
    job.job.write_bytes(msgspec.json.encode(config))
    job.token.write_text("token")
    job.master.write_bytes(msgspec.json.encode(MasterAddress("127.0.0.1:1", 1)))
    with pytest.raises(InfrastructureError) as away:
        QUESTIONS[question](job)
    assert str(away.value) == "The master at 127.0.0.1:1 cannot be reached: Connection refused."
    outcome = Outcome(exit_code=0, reason="All workers succeeded.")
    job.outcome.write_bytes(msgspec.json.encode(outcome))
    with pytest.raises(ConfigurationError) as ended:
        QUESTIONS[question](job)
    assert str(ended.value) == f"The job in {tmp_path} has ended: All workers succeeded."


def test_the_status_of_a_job_with_a_damaged_journal_says_so(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    job.job.write_bytes(msgspec.json.encode(MasterConfig(job=JobSpec(name="job"))))
    job.token.write_text("token")
    job.master.write_bytes(msgspec.json.encode(MasterAddress("127.0.0.1:1", 1)))
    job.journal.write_bytes(b"damaged" * 1000)
    with pytest.raises(InfrastructureError) as caught:
        queries.status(job)
    assert str(caught.value) == (
        "The master at 127.0.0.1:1 cannot be reached: Connection refused. "
        f"The journal {job.journal} is damaged: file is not a database."
    )


def begun_by_another_version(path: Path, journal: str) -> JobDir:
    """A job directory as the first version wrote it: without a format, with a field that went."""
    job = JobDir(path)
    job.path.mkdir()
    job.job.write_text(f'{{"job": {{"name": "old", "gone": 1}}, "journal": "{journal}"}}')
    job.events.write_text('{"seq": 1, "time": 0.0, "body": {"type": "gone"}}\n')
    job.lock.touch()
    return job


def test_a_job_of_another_version_is_refused_and_stays_as_it_is(
    env: dict[str, str], tmp_path: Path
) -> None:
    job = begun_by_another_version(tmp_path / "job", "file:")
    before = {path.name: path.read_bytes() for path in job.path.iterdir()}
    with pytest.raises(FormatError) as asked:
        jobs.find(env, "", str(job.path))
    assert str(asked.value) == (
        f"{job.job} has format 1, of another version of DLRover; this one reads format {FORMAT}. Finish the job "
        "with the version that began it, or start a new job in another directory: this file stays as it is."
    )
    with pytest.raises(FormatError, match="has format 1"), jobs.locked(job, resume=True):
        pass  # dlrover master, in the directory of an earlier one
    with pytest.raises(FormatError, match="has format 1"):
        load_config(job)
    assert {path.name: path.read_bytes() for path in job.path.iterdir()} == before


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_journal_elsewhere_is_put_aside_though_the_first_attempt_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Else the next job would go on from it, and end at once as the last one has."""
    journal = tmp_path / "elsewhere.sqlite"
    journal.touch()
    job = begun_by_another_version(tmp_path / "job", f"file:{journal}")
    job.outcome.touch()
    moved = []

    def until_full(source: Path, target: Path) -> None:
        if len(moved) == room:
            raise OSError(errno.ENOSPC, "No space left on device")
        moved.append(source.rename(target))

    with monkeypatch.context() as patch:
        patch.setattr(jobs.shutil, "move", until_full)
        with pytest.raises(InfrastructureError, match="No space left"), jobs.locked(job):
            pass
    with jobs.locked(job):
        assert not journal.exists()


@pytest.mark.parametrize(
    ("number", "of_new", "of_begun"),
    [
        (errno.EACCES, ConfigurationError, ConfigurationError),
        (errno.EROFS, ConfigurationError, InfrastructureError),
        (errno.ENOSPC, ConfigurationError, InfrastructureError),
        (errno.ESTALE, InfrastructureError, InfrastructureError),
    ],
)
def test_a_directory_where_a_job_has_begun_was_the_right_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    of_new: type[Exception],
    of_begun: type[Exception],
) -> None:
    job = JobDir(tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(jobs.files, "write_atomically", fails)
    with pytest.raises(of_new, match=f"--job-dir {tmp_path} cannot be used"):
        jobs.write(job, job.token, b"")
    job.journal.touch()
    with pytest.raises(of_begun, match=f"--job-dir {tmp_path} cannot be used"):
        jobs.write(job, job.token, b"")


def test_runs_of_which_some_were_deleted_are_numbered_on(tmp_path: Path) -> None:
    job_dir = JobDir(tmp_path)
    (tmp_path / "run-7").mkdir()
    (tmp_path / "run-mine").mkdir()
    job_dir.lock.touch()
    job_dir.outcome.touch()
    with jobs.locked(job_dir):
        assert (tmp_path / "run-8" / job_dir.outcome.name).exists()


def test_a_new_run_puts_a_journal_elsewhere_of_another_version_aside(tmp_path: Path) -> None:
    journal = tmp_path / "elsewhere.sqlite"
    journal.write_text("of the first version")
    job = begun_by_another_version(tmp_path / "job", f"file:{journal}")
    with jobs.locked(job):
        assert not journal.exists()
    assert (job.path / "run-1" / journal.name).read_text() == "of the first version"


@pytest.mark.slow
def test_a_master_that_finds_the_journal_of_another_version_ends_its_job_at_once(
    tmp_path: Path,
) -> None:
    job = JobDir(tmp_path)
    job.job.write_bytes(msgspec.json.encode(MasterConfig(job=JobSpec(name="job"))))
    job.token.write_text("token")
    job.master.write_bytes(msgspec.json.encode(MasterAddress("127.0.0.1:1", 1)))  # it has served
    with contextlib.closing(sqlite3.connect(job.journal)) as db:
        db.execute("PRAGMA user_version=1")
    ended = subprocess.run(
        [sys.executable, "-m", "dlrover.master", "--job-dir", str(tmp_path)], check=False
    )
    outcome = read_outcome(job.outcome)
    assert outcome is not None
    assert ended.returncode == outcome.exit_code == ExitCode.USAGE
    assert outcome.reason.startswith(f"{job.journal} has format 1, of another version of DLRover")


FAILS = "/proc/self/mem"
"""A file whose reads fail with an I/O error."""


@pytest.mark.parametrize("missing", [False, True])
def test_a_volume_that_fails_is_no_mistake_of_the_user(tmp_path: Path, missing: bool) -> None:
    job = JobDir(tmp_path)
    for path in (job.job, job.token, job.master, job.roles):
        path.symlink_to(tmp_path / "nothing" if missing else FAILS)
    readers: list[Callable[[], object]] = [
        lambda: load_config(job),
        lambda: read_token(job),
        lambda: connect(job),
        lambda: roles.connect(job),
        lambda: roles.load_config(job),
        lambda: wire.token_in(str(job.token), "--token-file"),
        lambda: wire.channel_credentials(TlsFiles(ca=str(job.token))),
        lambda: config.settings({}, str(job.token), {}),
    ]
    for read in readers:
        with pytest.raises(ConfigurationError if missing else InfrastructureError):
            read()
    if not missing:
        with pytest.raises(InfrastructureError, match="cannot be used: Input/output error"):
            jobs.kept_token(job)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EAGAIN])
def test_failures_and_limits_of_a_machine_are_no_mistakes(number: int) -> None:
    """EAGAIN is what a fork answers at the limit of processes."""
    assert kind_of(OSError(number, "")) is InfrastructureError


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG])
def test_a_wrong_path_is_a_mistake(number: int) -> None:
    assert kind_of(OSError(number, "")) is ConfigurationError


def test_a_volume_that_fails_while_another_process_holds_the_directory(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    job.lock.symlink_to(FAILS)
    with job.lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with (
            pytest.raises(InfrastructureError, match="cannot be used: Input/output error"),
            jobs.locked(job),
        ):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("process", ["master", "agent"])
def test_a_process_that_cannot_read_its_job_directory_ends_as_by_the_infrastructure(
    tmp_path: Path, process: str
) -> None:
    """Another master or node takes over; after exit code 2, the job would end."""
    job = JobDir(tmp_path)
    job.master.write_bytes(msgspec.json.encode(MasterAddress("127.0.0.1:1", 1)))  # it has served
    for path in (job.job, job.agent):
        path.symlink_to(FAILS)
    command = [sys.executable, "-m", f"dlrover.{process}", "--job-dir", str(tmp_path)]
    assert subprocess.run(command, timeout=30, check=False).returncode == ExitCode.INFRASTRUCTURE
