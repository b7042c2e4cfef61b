"""``dlrover brain``: what a platform operator sees."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlrover.cli import main
from dlrover.cli.cluster.brain import _limits
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


Dlrover = Callable[..., str]


@pytest.fixture
def dlrover(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Dlrover:
    """Runs ``dlrover brain`` in this process: what it prints, or its error where ``code`` is one."""

    def run(*words: str, code: int = 0, where: str = address) -> str:
        monkeypatch.setenv("DLROVER_BRAIN", where)
        monkeypatch.setenv("DLROVER_BRAIN_TOKEN", processes.TOKEN)
        monkeypatch.setattr(sys, "argv", ["dlrover", "brain", *words])
        try:
            status = main.main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        printed = capsys.readouterr()
        assert status == code, printed.err
        return printed.err if code else printed.out

    return run


def test_jobs_are_listed(dlrover: Dlrover) -> None:
    text = dlrover("jobs")
    assert "bert-1" in text
    assert "single-job" in text
    (job,) = json.loads(dlrover("jobs", "--running", "-o", "json"))
    assert (job["job"], job["samples"], job["plans"]) == ("bert-1", 2, 2)


def test_a_job_is_explained_with_the_error_of_its_prediction(dlrover: Dlrover) -> None:
    text = dlrover("explain", "bert-1")
    story = json.loads(dlrover("explain", "bert-1", "-o", "json"))
    first, second = story["plans"]
    assert first["error"] == pytest.approx(1900 / first["plan"]["effect"]["throughput"] - 1)
    assert f"error {first['error']:+.1%}" in text
    assert first["plan"]["reason"] in text
    assert "applied, 1,900 samples/s measured" in text
    assert second["error"] is None
    assert "not reported yet" in text
    assert "Predictions: 1 measured" in text


def test_what_if_predicts(dlrover: Dlrover) -> None:
    text = dlrover("what-if", "bert-1", "--workers", "4")
    assert "2 workers (1 GPU, 4 CPU) -> 4 workers (1 GPU, 4 CPU)" in text
    assert "farther" not in text
    assert "farther" in dlrover("what-if", "bert-1", "--workers", "32")
    found = json.loads(dlrover("what-if", "bert-1", "--workers", "4", "-o", "json"))
    assert found["inside"] is True


def test_the_cluster_and_its_quotas_are_shown(dlrover: Dlrover) -> None:
    dlrover("quota", "research", "accelerator=4,cpu=32")
    text = dlrover("cluster")
    assert "2 of 2 machines ready" in text
    assert "queue research: accelerator 4, cpu 32" in text
    dlrover("quota", "research", "-")
    assert "research" not in dlrover("cluster")


def test_errors_are_one_sentence(dlrover: Dlrover, tmp_path: Path) -> None:
    said = dlrover("explain", "none", code=2)
    assert said == "dlrover: The Brain knows no job none; dlrover brain jobs lists them.\n"
    said = dlrover("jobs", where="127.0.0.1:1", code=3)
    assert said.startswith("dlrover: The Brain at 127.0.0.1:1 cannot be reached")
    wrong = tmp_path / "token"
    wrong.write_text("wrong")
    said = dlrover("jobs", "--token-file", str(wrong), code=2)
    assert "refused the connection" in said


def test_limits_are_resources_with_amounts() -> None:
    assert _limits("accelerator=4,cpu=2.5") == {"accelerator": 4, "cpu": 2.5}
    assert _limits("-") == {}
    for wrong in ("gpu=4", "cpu", "cpu=many", "cpu=-1", ""):
        with pytest.raises(ConfigurationError, match="accelerator"):
            _limits(wrong)
