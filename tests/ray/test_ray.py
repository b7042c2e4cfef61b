"""Jobs on a real Ray cluster: what they compute, what they survive, and that they leave nothing behind."""

from __future__ import annotations

import json

import psutil
import pytest

from dlrover.spec import events
from tests.process.conftest import Training

pytestmark = [
    pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # Ray's own
]  # fmt: skip

WAIT = 200.0
"""Seconds for a node to be replaced, and for the steps after it."""


@pytest.fixture
def train(run, ray_cluster):
    def start(nodes: int, steps: int, step_time: float, **options: object) -> Training:
        options = {"max_restarts": 0, "shutdown_timeout": 5, **options}
        return Training(run, steps, step_time, *ray_cluster.options(nodes, **options))

    return start


def losses(training: Training) -> list[tuple[int, float]]:
    return [(step, round(loss, 6)) for step, loss, _ in training.losses]


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Losses of 60 steps of a local run."""
    from tests.process.conftest import Runner

    runner = Runner(tmp_path_factory.mktemp("local"))
    training = Training(runner, 60, 0.0, "--local-nodes", "2")
    training.launch.succeed(WAIT)
    runner.close()
    return losses(training)


def test_a_job_survives_every_kill_and_computes_what_a_local_one_does(
    run, ray_cluster, train, local
):
    training = train(2, 60, 0.4)
    launch = training.launch
    launch.until(lambda: len(training.losses) >= 3, WAIT, "step 3")
    # From anywhere: by the name of the job.
    shown = run.dlrover(
        "status", "--platform", "ray", "--ray-address", ray_cluster.address, "--output", "json",
        timeout=WAIT,
    )  # fmt: skip
    assert json.loads(shown.stdout)["status"]["phase"] == "running", shown.stderr

    def survive(victim: psutil.Process) -> None:
        before = len(launch.events_of(events.RoundCompleted))
        victim.kill()
        launch.until(
            lambda: len(launch.events_of(events.RoundCompleted)) > before, WAIT, "a new round"
        )
        done = len(training.losses)
        launch.until(lambda: len(training.losses) > done, WAIT, "a step")

    survive(ray_cluster.workers()[0])
    survive(ray_cluster.agents()[0])
    survive(ray_cluster.agents()[0].parent())
    [master] = ray_cluster.masters()
    master.kill()
    launch.until(lambda: launch.events_of(events.MasterRecovered), WAIT, "the master")
    survive(ray_cluster.agents()[0].parent().parent())  # a raylet
    ray_cluster.add_nodes(1)
    launch.succeed(WAIT)
    assert losses(training) == local
