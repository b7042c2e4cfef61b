"""Job directories: made, locked, put aside, found again."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.cli import jobs
from dlrover.errors import ConfigurationError


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"DLROVER_STATE_DIR": str(tmp_path / "state")}


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
    assert jobs.shared_token({"DLROVER_TOKEN": "t"}, "id") == ("t", "")
    derived, notice = jobs.shared_token({}, "id")
    assert derived == jobs.shared_token({}, "id")[0] != jobs.shared_token({}, "other")[0]
    assert "DLROVER_TOKEN" in notice
