"""A job whose gradients are noisy gets a larger batch of the Brain; its learning rate and its data follow."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from dlrover.errors import ExitCode
from dlrover.rpc.brain import BrainClient, request_id
from dlrover.spec import brain, events
from tests.brain import processes

pytest.importorskip("torch")
pytest.importorskip("scipy")
pytest.importorskip("sqlalchemy")

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.heavy, pytest.mark.timeout(180)]

SAMPLES = 4000


def test_a_noisy_job_gets_a_larger_batch(run) -> None:
    out = run.directory / "out"
    out.mkdir()
    with processes.brain(f"sqlite:///{run.directory}/brain.db") as server:
        ask(server.address, lambda client: client.report(MACHINES))
        limits = "heartbeat_interval=0.5,autoscale_window=4,autoscale_interval=4"
        launch = run(
            *("--nnodes=2:3", "--local-nodes=2", "--auto-scale", f"--rdzv-conf={limits}"),
            *(run.scripts / "noisy.py", out),
            env={
                "DLROVER_BRAIN": server.address,
                "DLROVER_BRAIN_TOKEN": processes.TOKEN,
                "DLROVER_OPTIMIZE_MODE": "cluster",
            },
        )
        launch.until(lambda: launch.events_of(events.PlanMeasured), 90, "a plan's outcome")
        (ours,) = ask(server.address, lambda client: client.jobs())
        story = ask(server.address, lambda client: client.explain(ours.job))
    made = launch.events_of(events.PlanMade)[0].body
    assert made.batch >= 16
    assert f"with batches of {made.batch} samples" in made.reason
    assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
    launch.end_with(ExitCode.STOPPED)

    noise = story.samples[0].batches
    assert (noise.least, noise.most, noise.pass_most) == (8, 64, 32)
    assert noise.variance == pytest.approx(9 * 200, rel=0.15)
    assert story.plans[0].state == "applied"
    steps = whole_steps(out)
    assert {step["batch"] for step in steps} >= {8, made.batch}
    for step in steps:
        assert step["rate"] == pytest.approx(1e-4 * step["batch"] / 8)
        assert len(step["taken"]) == step["batch"] or step["at"] == SAMPLES
    for epoch in {step["epoch"] for step in steps}:
        taken = [n for step in steps if step["epoch"] == epoch for n in step["taken"]]
        assert len(taken) == len(set(taken))


def whole_steps(out: Path) -> list[dict]:
    """The steps that were saved, with the samples of all ranks.

    Rank 0 writes after it has saved; a step that others have written was made again if that was not saved.
    """
    ranks = [
        {
            (step["epoch"], step["at"], step["batch"]): step
            for step in map(json.loads, path.read_text().splitlines())
        }
        for path in sorted(out.glob("steps-*"))
    ]
    found = []
    for key, first in ranks[0].items():
        parts = [rank[key] for rank in ranks if key in rank]
        if len(parts) == first["ranks"]:  # none was stopped between the save and its line
            found.append({**first, "taken": [n for part in parts for n in part["taken"]]})
    assert len(found) > 0.9 * len(ranks[0])
    return found


MACHINES = brain.ReportCluster(
    request=request_id(), nodes=(brain.ClusterNode(name="m", capacity={"cpu": 8.0}),)
)


def ask(address: str, question):
    async def asking():
        async with BrainClient(address, processes.TOKEN) as client:
            return await question(client)

    return asyncio.run(asking())
