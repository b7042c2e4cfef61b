"""``dlrover brain``: what a platform operator sees."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.cli.brain import _limits
from dlrover.errors import ConfigurationError
from dlrover.rpc.brain import BrainClient
from tests.brain import jobs, processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a Brain that knows a job with two plans, one of which has an outcome."""
    folder = tmp_path_factory.mktemp("brain")
    with processes.brain(f"sqlite:///{folder}/brain.db") as running:
        asyncio.run(tell(running.address))
        yield running.address


async def tell(address: str) -> None:
    async with BrainClient(address, processes.TOKEN) as client:
        await client.report(jobs.register("bert-1", name="bert"))
        await client.report(jobs.samples("bert-1", jobs.shape(1), jobs.shape(2)))
        first = await client.plan("bert-1", jobs.shape(2))
        await client.report(jobs.outcome("bert-1", first.plan_id, 1900.0))
        await client.plan("bert-1", jobs.shape(2))
        await client.report(jobs.machines(2))


def dlrover(*words: str, address: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "dlrover.cli.main", "brain", *words]
    done = subprocess.run(
        command,
        env=processes.environment(DLROVER_BRAIN=address),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def test_jobs_are_listed(address: str) -> None:
    text = dlrover("jobs", address=address)
    assert "bert-1" in text
    assert "single-job" in text
    (job,) = json.loads(dlrover("jobs", "--running", "-o", "json", address=address))
    assert (job["job"], job["samples"], job["plans"]) == ("bert-1", 2, 2)


def test_a_job_is_explained_with_the_error_of_its_prediction(address: str) -> None:
    text = dlrover("explain", "bert-1", address=address)
    story = json.loads(dlrover("explain", "bert-1", "-o", "json", address=address))
    first, second = story["plans"]
    assert first["error"] == pytest.approx(1900 / first["plan"]["effect"]["throughput"] - 1)
    assert f"error {first['error']:+.1%}" in text
    assert first["plan"]["reason"] in text
    assert "applied, 1,900 samples/s measured" in text
    assert second["error"] is None
    assert "not reported yet" in text
    assert "Predictions: 1 measured" in text


def test_what_if_predicts(address: str) -> None:
    text = dlrover("what-if", "bert-1", "--workers", "4", address=address)
    assert "2 workers (1 GPU, 4 CPU) -> 4 workers (1 GPU, 4 CPU)" in text
    assert "farther" not in text
    assert "farther" in dlrover("what-if", "bert-1", "--workers", "32", address=address)
    found = json.loads(
        dlrover("what-if", "bert-1", "--workers", "4", "-o", "json", address=address)
    )
    assert found["inside"] is True


def test_the_cluster_and_its_quotas_are_shown(address: str) -> None:
    dlrover("quota", "research", "accelerator=4,cpu=32", address=address)
    text = dlrover("cluster", address=address)
    assert "2 of 2 machines ready" in text
    assert "queue research: accelerator 4, cpu 32" in text
    dlrover("quota", "research", "-", address=address)
    assert "research" not in dlrover("cluster", address=address)


def test_errors_are_one_sentence(address: str, tmp_path: Path) -> None:
    said = dlrover("explain", "none", address=address, code=2)
    assert said == "dlrover: The Brain knows no job none; dlrover brain jobs lists them.\n"
    said = dlrover("jobs", address="127.0.0.1:1", code=3)
    assert said.startswith("dlrover: The Brain at 127.0.0.1:1 cannot be reached")
    wrong = tmp_path / "token"
    wrong.write_text("wrong")
    said = dlrover("jobs", "--token-file", str(wrong), address=address, code=2)
    assert "refused the connection" in said


def test_limits_are_resources_with_amounts() -> None:
    assert _limits("accelerator=4,cpu=2.5") == {"accelerator": 4, "cpu": 2.5}
    assert _limits("-") == {}
    for wrong in ("gpu=4", "cpu", "cpu=many", "cpu=-1", ""):
        with pytest.raises(ConfigurationError, match="accelerator"):
            _limits(wrong)
