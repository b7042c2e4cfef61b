"""``dlrover master`` by itself."""

from __future__ import annotations

import fcntl
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dlrover.cli import main
from dlrover.dashboard.inspect import queries
from dlrover.errors import ConfigurationError, ExitCode
from dlrover.master import app
from dlrover.master.files import read_outcome
from dlrover.spec.jobdir import JobDir
from tests.waiting import until


@pytest.mark.parametrize(
    ("given", "kept", "said"),
    [(" \n", "0f" * 16, ""), ("é", "", "The token has 1 characters or holds others than")],
)
def test_the_token_of_the_environment_is_checked_before_the_master_runs(
    tmp_path: Path, monkeypatch, given: str, kept: str, said: str
) -> None:
    monkeypatch.setenv("DLROVER_TOKEN", given)
    monkeypatch.setattr(main.secrets, "token_hex", lambda _: "0f" * 16)
    monkeypatch.setattr(app, "main", lambda _: 0)
    command = ["master", "--port=0", f"--job-dir={tmp_path / 'job'}"]
    done = CliRunner().invoke(main.app, command)
    token = JobDir(tmp_path / "job").token
    assert (token.read_text() if token.exists() else "") == kept
    assert said in str(done.exception or "")
    assert isinstance(done.exception, ConfigurationError) is bool(said)


def ran(job_dir: JobDir, port: int) -> subprocess.Popen[bytes]:
    command = ["master", f"--port={port}", "--host=127.0.0.1", f"--job-dir={job_dir.path}"]
    return subprocess.Popen([sys.executable, "-m", "dlrover.cli.main", *command])


@pytest.mark.slow
def test_of_the_masters_of_a_directory_the_last_one_says_how_the_job_ended(tmp_path: Path) -> None:
    """One could not begin, the next one is stopped by a user, and one starts although the job has ended."""
    job_dir = JobDir(tmp_path / "job")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ran(job_dir, port) as process:
            assert process.wait(20) == ExitCode.INFRASTRUCTURE
    assert job_dir.outcome.exists()
    with ran(job_dir, port) as process:
        until(job_dir.master.exists, 20)
        assert not job_dir.outcome.exists()
        queries.stop(job_dir, "Enough.")
        assert process.wait(20) == ExitCode.STOPPED
    with ran(job_dir, port) as process:
        assert process.wait(20) == ExitCode.STOPPED
    outcome = read_outcome(job_dir.outcome)
    assert outcome is not None
    assert (outcome.exit_code, outcome.reason) == (ExitCode.STOPPED, "Enough.")


@pytest.mark.slow
def test_a_master_that_is_asked_to_stop_ends_in_order(tmp_path: Path) -> None:
    job_dir = JobDir(tmp_path / "job")
    command = ["master", "--port=0", f"--job-dir={job_dir.path}"]
    with subprocess.Popen([sys.executable, "-m", "dlrover.cli.main", *command]) as process:
        try:
            late = time.monotonic() + 20
            while not job_dir.master.exists():
                assert process.poll() is None
                assert time.monotonic() < late
                time.sleep(0.05)
            process.terminate()
            # Not by the signal itself, which the first process of a container would not hear.
            assert process.wait(20) == ExitCode.SIGNAL_BASE + signal.SIGTERM
        finally:
            process.kill()


@pytest.mark.slow
def test_a_lock_of_another_machine_is_waited_for(tmp_path: Path) -> None:
    """A file server keeps that of a lost machine for a while; here, its process is in another namespace."""
    elsewhere = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*elsewhere, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a namespace of processes")
    job_dir = JobDir(tmp_path)
    command = [*elsewhere, sys.executable, "-m", "dlrover.cli.main", "master", "--port=0"]
    command.append(f"--job-dir={tmp_path}")

    def started(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*command, *more], stderr=subprocess.PIPE, text=True)

    with job_dir.lock.open("w") as file:
        file.write("7 of lost")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with started("--rdzv-conf=master_timeout=1") as impatient:
            _, said = impatient.communicate(timeout=60)
        assert impatient.returncode == ExitCode.INFRASTRUCTURE
        assert "(process 7 of lost) has held it for 1 s; end that process" in said
        next_one = started()
        assert next_one.stderr is not None
        assert "(process 7 of lost) holds it; if that machine is lost" in next_one.stderr.readline()
        assert not job_dir.job.exists()
    with next_one:
        until(job_dir.master.exists, 30)
        next_one.kill()
