"""The example with embeddings that grow, as users run it, with workers and servers killed on the way."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "08_growing_embeddings"
CLICKS = ("--data", "clicks", "--clicks", "6000", "--batch-size", "200", "--save-every", "10")
"""30 steps."""


def last(printed: str) -> str:
    return printed.strip().splitlines()[-1]


def kill_worker(launch, rank: int) -> None:
    """Kill the worker that printed its process number for this rank."""
    (pid,) = re.findall(rf"^rank {rank} of \d+: process (\d+)$", launch.stdout, re.MULTILINE)
    os.kill(int(pid), signal.SIGKILL)


def test_rows_model_and_events_are_of_the_same_step_after_a_kill(run) -> None:
    """One process computes the same whether it was killed or not, so nothing is lost or learned twice."""
    undisturbed = run(EXAMPLE / "train.py", "--out", run.directory / "one", *CLICKS).succeed(120)
    assert "the second half of 6000 events: logloss 0." in last(undisturbed)
    out = run.directory / "two"
    options = ("--out", out, *CLICKS, "--step-time", "0.05")
    launch = run("--max-restarts=1", EXAMPLE / "train.py", *options)
    launch.until(lambda: "step 10:" in launch.stdout, 120, "step 10")
    kill_worker(launch, 0)
    printed = launch.succeed(120)
    assert printed.count("rank 0 of 1: process") == 2
    assert last(printed) == last(undisturbed)
    assert len(list((out / "rows").iterdir())) == 2, "older files are gone"


@pytest.mark.parametrize("model", ["deepfm", pytest.param("dlrm", marks=pytest.mark.heavy)])
def test_workers_and_servers_are_killed_and_the_training_goes_on(run, model: str) -> None:
    out = run.directory / "out"
    options = ("--out", out, *CLICKS, "--step-time", "0.05", "--model", model)
    launch = run(
        "--max-restarts=1",
        "--nproc-per-node=2",
        "--embedding-servers=2",
        EXAMPLE / "train.py",
        *options,
    )
    launch.until(lambda: "step 10:" in launch.stdout, 120, "step 10")
    kill_worker(launch, 1)
    launch.until(lambda: "step 20:" in launch.stdout, 120, "step 20")
    server = next(p for p in launch.of_kind("worker") if "dlrover.embedding" in p.cmdline())
    server.send_signal(signal.SIGKILL)
    printed = launch.succeed(120)
    assert printed.count("rank 0 of 2: process") == 2, "the death of a server stops no worker"
    rows = {
        int(step): int(count)
        for step, count in re.findall(r"^step (\d+): (\d+) rows", printed, re.MULTILINE)
    }
    assert rows[20] < rows[30] <= 3000
    late = re.search(
        r"the second half of 6000 events: logloss (0\.\d+), AUC (0\.\d+)", last(printed)
    )
    assert late is not None
    assert float(late[2]) > 0.55


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["deepfm", "dlrm"])
def test_it_learns_which_films_users_like(run, model: str) -> None:
    out = run.directory / "out"
    options = ("--out", out, "--model", model)
    launch = run("--nproc-per-node=2", "--embedding-servers=2", EXAMPLE / "train.py", *options)
    printed = launch.succeed(150)
    if "made-up clicks instead of MovieLens-100k" in printed:
        pytest.skip("MovieLens-100k cannot be downloaded")
    assert "step 391: 4178 rows" in printed
    late = re.search(r"logloss (0\.\d+), AUC (0\.\d+)", last(printed))
    assert late is not None
    assert float(late[2]) > 0.71
