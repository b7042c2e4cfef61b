"""Each recipe trains to its end, though its controller has to replace a pod."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes import machines
from tests.recipes.playing import MANIFESTS, PROGRAM, ROOT, Played, job_of
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

COUNT = Path(__file__).parent / "count.py"
FAILS = ROOT / "tests" / "process" / "scripts" / "fails.py"
STEPS = 30


@pytest.fixture
def play(cluster: machines.Cluster, tmp_path: Path) -> Callable[..., Played]:
    """Plays a manifest, its program replaced by a smaller one: ``play(manifest, *program)``."""

    def make(name: str, *program: object) -> Played:
        job = job_of(name)
        words = [str(word) for word in program]
        for pod in job.pods:
            if pod.command[:2] == ["sh", "-c"]:
                before = pod.command[2].partition(PROGRAM)[0]
                pod.command[2] = before + shlex.join(words)
            else:
                del pod.command[pod.command.index(PROGRAM) :]
                pod.command.extend(words)
        return Played(cluster, tmp_path, job)

    return make


def assert_trained(played: Played, steps: int) -> None:
    """Every step was made once, the last one by two workers."""
    made = played.steps()
    assert [record["step"] for record in made] == list(range(1, steps + 1)), played.report()
    assert made[-1]["world_size"] == 2


def test_pytorchjob_goes_on_when_a_worker_is_drained(play: Callable[..., Played]) -> None:
    """SIGTERM for a pod other than the first is that pod's own matter."""
    played = play("pytorchjob.yaml", COUNT, "/mnt/digits", STEPS)
    for index in range(2):
        played.start(index)
    until(lambda: len(played.steps()) >= 8, 60, "step 8")
    played.kill(1, signal.SIGTERM)
    played.to_its_end()
    assert_trained(played, STEPS)
    assert played.ended[0] == ("digits-worker-1", 143)
    assert sorted(played.ended[1:]) == [("digits-worker-0", 0), ("digits-worker-1", 0)]


@pytest.mark.torch
def test_jobset_goes_on_when_the_pod_of_the_master_is_killed(play: Callable[..., Played]) -> None:
    """The new pod has the same name and another address."""
    program = [PROGRAM, "--out=/mnt/digits", "--epochs=2", "--target-accuracy=0"]
    played = play("jobset.yaml", *program, "--step-time=0.05")
    for index in range(2):
        played.start(index)
    until(lambda: len(played.steps()) >= 12, 60, "step 12")
    played.kill(0)
    played.to_its_end()
    assert_trained(played, 2 * 14)
    assert played.ended[0] == ("digits-node-0-0", 137)
    assert sorted(played.ended[1:]) == [("digits-node-0-0", 0), ("digits-node-0-1", 0)]
    assert "resumed from step" in played.report()


def test_trainjob_waits_for_dns_and_starts_anew_when_the_master_is_evicted(
    play: Callable[..., Played], cluster: machines.Cluster
) -> None:
    """SIGTERM for the pod of rank 0 ends the job in all pods, and the controller makes them again."""
    played = play("trainjob.yaml", COUNT, "/mnt/digits", STEPS)
    played.start(1)
    machine = played.start(0, known=False)
    waits = "waiting up to 600 s (connect_timeout) for the master's host"
    until(lambda: played.report().count(waits) == 2, 20, "the notice in both pods")
    cluster.publish("digits-node-0-0.digits", machine.address)
    until(lambda: len(played.steps()) >= 8, 60, "step 8")
    played.kill(0, signal.SIGTERM)
    played.to_its_end()
    assert_trained(played, STEPS)
    codes = [code for _, code in played.ended]
    assert codes == [143, 143, 0, 0]


def test_volcano_goes_on_when_a_worker_is_killed(play: Callable[..., Played]) -> None:
    played = play("volcano.yaml", COUNT, "/mnt/digits", STEPS)
    for index in range(2):
        played.start(index)
    until(lambda: len(played.steps()) >= 8, 60, "step 8")
    played.kill(1)
    played.to_its_end()
    assert_trained(played, STEPS)
    assert played.ended[0] == ("digits-worker-1", 137)


def test_a_fault_of_the_program_ends_every_pod_for_good(play: Callable[..., Played]) -> None:
    played = play("volcano.yaml", FAILS, "missing_module")
    for index in range(2):
        played.start(index)
    containers = list(played.running.values())
    until(lambda: all(c.exit_code is not None for c in containers), 40, "the end")
    assert [container.exit_code for container in containers] == [1, 1], played.report()
    for name in MANIFESTS:
        assert not job_of(name).replaces(1)
        assert job_of(name).replaces(137)
