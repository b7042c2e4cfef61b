"""How the commands select their job: by name, by directory, and one role of several."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from dlrover.cli.main import app
from dlrover.errors import ConfigurationError
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import Outcome


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """An ended job of several roles, the last one of this user."""
    monkeypatch.setenv("DLROVER_STATE_DIR", str(tmp_path))
    found = JobDir(tmp_path / "jobs" / "rl-20260101-000000-0000")
    found.path.mkdir(parents=True)
    found.roles.write_text("{}")
    found.outcome.write_bytes(msgspec.json.encode(Outcome(exit_code=0, reason="It is done.")))
    (tmp_path / "last").symlink_to(found.path)
    return found


@pytest.mark.parametrize("select", [[], ["rl"], ["--job-dir", "{}"]])
def test_a_job_is_selected_by_name_by_directory_or_as_the_last(
    job: JobDir, select: list[str]
) -> None:
    done = CliRunner().invoke(app, ["stop", *(s.format(job.path) for s in select), "-o", "json"])
    assert json.loads(done.stdout) == {
        "job_dir": str(job.path),
        "stopping": False,
        "message": f"The job in {job.path} has ended already: It is done.",
    }


@pytest.mark.parametrize(
    "command",
    ["nodes", "plan", "stacks", "top", "drain 0", "scale --nodes 1", "goodput --html x"],
)
def test_a_command_for_one_role_names_its_directory(job: JobDir, command: str) -> None:
    error = CliRunner().invoke(app, command.split()).exception
    assert isinstance(error, ConfigurationError)
    assert f"give --job-dir {job.path}/roles/ROLE" in str(error)


def test_options_of_ray_are_refused_without_it(job: JobDir) -> None:
    error = CliRunner().invoke(app, ["status", "--ray-address", "x:1"]).exception
    assert "needs --platform ray" in str(error)
    assert CliRunner().invoke(app, ["top", "--platform", "ray"]).exit_code == 2


def test_a_misspelt_variable_does_not_select_another_job(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLROVER_JOBDIR", "/jobs/mine")
    done = CliRunner().invoke(app, ["status"])
    assert str(done.exception).endswith(
        "DLROVER_JOBDIR is set and is no variable of DLRover. Did you mean DLROVER_JOB_DIR?"
    )
