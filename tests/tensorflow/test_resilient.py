"""Trainings with TensorFlow's parameter servers go on when tasks are killed, added, moved or removed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

from dlrover.spec import events
from tests.tensorflow.conftest import SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]
SAMPLES, EPOCHS = 4000, 2
COUNTED = {"steps": SAMPLES * EPOCHS // 10, "wrong": {}}
"""Each sample counts once an epoch, whatever happens."""


@pytest.mark.parametrize(("servers", "spares"), [(2, 0), (3, 1)])
def test_samples_count_once_while_servers_are_killed(job, servers: int, spares: int) -> None:
    training = job("counted.py", SAMPLES, EPOCHS, spares, servers=servers, local_nodes=2)
    pids = set()
    for _ in range(3):
        training.train(40)
        pids |= training.launch.pids("worker")
        before = training.cluster
        training.kill("ps")
        training.begun(lambda cluster, before=before: cluster != before, "another cluster")
    assert training.end() == COUNTED
    assert len(training.notes("begin")) == 4
    assert not training.launch.events_of(events.RestartDecided), "the chief is the same process"


def test_a_keras_model_learns_the_same_while_servers_are_killed(job, run) -> None:
    training = job("fitted.py", 4, 150)
    for _ in range(3):
        training.train(40)
        before = training.cluster
        training.kill("ps")
        training.begun(lambda cluster, before=before: cluster != before, "another cluster")
    end = training.end()
    assert (end["steps"], end["iterations"]) == (600, 600)
    assert len(training.notes("begin")) == 4, "no call fails for the address of a server before"
    assert end["loss"] == pytest.approx(end["undisturbed"], rel=0.5, abs=0.02)


def test_servers_and_workers_come_and_go(job) -> None:
    training = job("counted.py", SAMPLES, EPOCHS)
    training.train(20)
    training.scale("ps", 3)
    training.begun(lambda cluster: len(cluster["ps"]) == 3, "three servers")
    training.scale("worker", 2)
    training.begun(lambda cluster: len(cluster["worker"]) == 2, "two workers")
    training.scale("ps", 1)
    training.begun(lambda cluster: len(cluster["ps"]) == 1, "one server")
    steps = [note[2] for note in training.notes("step")]
    assert steps == sorted(set(steps)), "a planned change repeats nothing"
    assert training.end() == COUNTED


def test_a_program_with_its_own_checkpoints_needs_the_guard_only(job) -> None:
    training = job("own.py", 2000)
    training.train(30)
    training.scale("ps", 3)
    training.begun(lambda cluster: len(cluster["ps"]) == 3, "three servers")
    training.train(20)
    before = training.cluster
    training.kill("ps")
    training.begun(lambda cluster: cluster != before, "another cluster")
    assert training.end() == {"steps": 2000}
    began = [note[2] for note in training.notes("begin")]
    assert began[1] >= 20
    assert began[2] >= began[1]


def test_the_chief_restarts_alone(job) -> None:
    training = job("counted.py", SAMPLES, EPOCHS)
    training.train(20)
    servers = training.cluster["ps"]
    training.kill("chief")
    training.begun(lambda _: len(training.notes("begin")) > 1, "another chief")
    assert training.cluster["ps"] == servers, "the servers went on"
    assert training.end() == COUNTED


def test_a_worker_restarts_alone_and_the_others_go_on(job) -> None:
    training = job("counted.py", SAMPLES, EPOCHS, local_nodes=2)
    training.train(20)
    training.kill("worker")
    training.train(40)
    training.launch.until(
        lambda: any(
            e.body.role == "worker" for e in training.launch.events_of(events.InstanceStarted)[4:]
        ),
        60,
        "the worker's return",
    )
    end = training.end()
    assert end["steps"] == COUNTED["steps"]
    assert sum(end["wrong"].values()) <= 10 * (EPOCHS + 1), (
        "TensorFlow repeats the step of a lost worker"
    )


def test_a_server_that_hangs_is_replaced_once_its_node_is_lost(job) -> None:
    training = job("counted.py", SAMPLES, EPOCHS)
    training.train(20)
    before = training.cluster
    training.kill("ps", number=signal.SIGSTOP)
    (agent,) = [p for p in training.launch.of_kind("agent") if p.cmdline()[-1] == "1048577"]
    agent.kill()
    training.begun(lambda cluster: cluster != before, "another cluster")
    assert training.end() == COUNTED


def test_each_call_of_fit_goes_on_where_it_was(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "refitted.py", tmp_path],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    fits = {"short": (0, 1), "again": (0, 1), "later": (2,)}
    places = [f"{fit} {epoch} {batch}" for fit in fits for epoch in fits[fit] for batch in range(3)]
    assert done.stdout.splitlines() == [
        *(f"step {number}: {place}" for number, place in enumerate(places, 1)),
        f"end {len(places)}: {len(places)}",
    ]


def test_no_call_of_fit_is_skipped_in_silence_or_fails_for_its_model(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "called.py", tmp_path],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    before = "call 1 before had 0 and 2, and was over at step"
    again = "a training function must make the same calls in the same order each time, also those that are over."
    assert done.stdout.splitlines() == [
        "a dict: (2, [(2, 1), (1,)])",
        "own with a dict: (2, [(2, 1), (1,)])",
        "integers: (2, [])",
        "any rank: (2, [])",
        "two models: (4, [(2, 1), (1,), (3, 1), (1,)])",
        f"no warm-up: call 1 of fit has initial_epoch=2 and epochs=6 at step 7; {before} 7; {again}",
        f"alike: the function made 1 calls of fit, and 2 before, up to step 7; {again}",
        "warm-up alone: 4",
        f"followed: call 1 of fit has initial_epoch=0 and epochs=2 at step 8; {before} 6; {again}",
        "former: None",
        "former: 10",
        "longer: 4",
        "longer: 8",
        "stopped: (4, 7.0)",
        "stopped: (4, 7.0)",
        "stopped: (6, 6.22)",
        "listed: 8",
    ]
