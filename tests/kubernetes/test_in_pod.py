"""The exit code of a master in its pod, by which the operator learns whether its job has ended."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dlrover.cli import jobs, main
from dlrover.errors import ExitCode, InfrastructureError
from dlrover.kubernetes.api import elasticjobs
from dlrover.kubernetes.api.client import Client
from dlrover.kubernetes.platform import job as elastic_job
from dlrover.kubernetes.resources import validation
from dlrover.kubernetes.resources.types import ElasticJob
from dlrover.master import app
from dlrover.spec.jobdir import JobDir
from tests.kubernetes import manifests


def served(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    master: Callable[[], int] = lambda: 0,
    fetched: Callable[[], ElasticJob] = lambda: validation.parse(manifests.job()),
) -> int:
    """The exit code of ``dlrover master`` in a pod, where the API server and the master do what the test says."""

    async def fetch(_env: object) -> ElasticJob:
        return fetched()

    monkeypatch.setattr(elastic_job, "fetch", fetch)
    monkeypatch.setattr(app, "main", lambda _: master())
    command = ["master", "--platform=kubernetes", "--port=0", f"--job-dir={path}"]
    return CliRunner().invoke(main.app, command).exit_code


def by_a_directory(path: Path) -> None:
    """Put in the place of a file what cannot be read, written or removed as one."""
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.parametrize("file", ["outcome.json", ".left.json.reserved"])
def test_a_volume_that_fails_while_the_master_ends_does_not_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def master() -> int:
        by_a_directory(tmp_path / file)
        raise OSError

    assert served(monkeypatch, tmp_path, master) == ExitCode.INTERNAL


def test_a_volume_that_fails_when_a_master_takes_over_does_not_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DLROVER_TOKEN", raising=False)
    JobDir(tmp_path).token.symlink_to("/proc/self/mem")  # reading it is an input/output error
    assert served(monkeypatch, tmp_path) == ExitCode.INTERNAL


def test_a_master_that_waits_for_its_volume_says_so_in_the_jobs_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the job's message was that the master is starting."""
    said: list[Mapping[str, str]] = []
    lock = JobDir(tmp_path).lock
    lock.write_text("7 of a-lost-machine")
    holder = lock.open()
    fcntl.flock(holder, fcntl.LOCK_EX)

    async def write(_client: object, _job: object, training: Mapping[str, str]) -> None:
        said.append(training)
        holder.close()

    monkeypatch.setattr(jobs, "_is_held_here", lambda _: False)
    monkeypatch.setattr(elasticjobs, "write_training", write)
    monkeypatch.setattr(Client, "from_config", contextlib.nullcontext)
    monkeypatch.setattr(jobs, "LOCK_RETRY", 0.01)
    assert served(monkeypatch, tmp_path) == ExitCode.SUCCESS
    (training,) = said
    assert training.keys() == {"waits"}, "its other parts stay"
    assert "(process 7 of a-lost-machine) holds it; if that machine is lost" in training["waits"]


def test_an_unexpected_error_before_the_master_begins_does_not_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched() -> ElasticJob:
        raise ZeroDivisionError

    assert served(monkeypatch, tmp_path, fetched=fetched) == ExitCode.INTERNAL


def test_a_master_that_ends_without_an_outcome_has_not_ended_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome on the volume is of a master that could not begin."""
    outcome = JobDir(tmp_path).outcome
    outcome.write_text('{"exit_code": 3, "reason": "The port is taken."}')
    assert served(monkeypatch, tmp_path, lambda: ExitCode.INFRASTRUCTURE) == ExitCode.INTERNAL


def test_an_outcome_counts_though_the_master_fails_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def master() -> int:
        JobDir(tmp_path).outcome.write_text('{"exit_code": 4, "reason": "No new step."}')
        raise InfrastructureError

    assert served(monkeypatch, tmp_path, master) == ExitCode.NO_PROGRESS
