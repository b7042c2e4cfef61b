"""A job whose master dies goes on: no worker notices, and the new master knows what the old one knew."""

import contextlib
import errno
import json
import socket
import subprocess
import sys
import time

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BACK_WITHIN = 2.0
"""Seconds; the project's promise for a machine that has nothing else to do."""


def allowed() -> float:
    """`BACK_WITHIN`, or where this machine is busy: three times what it takes to start a bare master now."""
    began = time.monotonic()
    command = [sys.executable, "-m", "dlrover.master", "--help"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return max(BACK_WITHIN, 3 * (time.monotonic() - began))


def kill_master(launch) -> float:
    """Kill the master; how long it takes until a new one serves."""
    known = launch.events_of(events.MasterRecovered)
    (master,) = launch.wait_for("master")
    began = time.monotonic()
    master.kill()
    count = len(known) + 1
    launch.until(lambda: len(launch.events_of(events.MasterRecovered)) == count, 10, "a new master")
    return time.monotonic() - began


def lasting(status: dict) -> dict:
    """What a status says that a change of the master must not change."""
    passing = {"steps": 0, "connected": True, "doing": ""}
    passing |= dict.fromkeys(("memory", "memory_limit", "cpu", "cores", "busy"), 0)
    nodes = [{**node, **passing} for node in status["status"]["nodes"]]
    measured = dict.fromkeys(("steps", "total_steps", "seconds", "rate", "seconds_left"), 0)
    return {**status["status"], **measured, "nodes": nodes}


@pytest.mark.torch
@pytest.mark.parametrize(
    "shape", [pytest.param("--nproc-per-node=2", marks=pytest.mark.heavy), "--local-nodes=2"]
)
def test_training_goes_on_while_the_master_is_away(run, train, undisturbed, shape: str) -> None:
    training = train(1000, 0.1, "--standalone", shape)
    launch = training.launch
    training.wait_for_step(3)
    workers, before = launch.pids("worker"), run.status(launch)
    assert len(workers) == 2
    absences = []
    for _ in range(2):
        step = len(training.losses)
        absences.append(kill_master(launch) / allowed())
        training.wait_for_step(step + 1, timeout=15)
        run.until(lambda: all(n["connected"] for n in run.status(launch)["status"]["nodes"]), 10)
        after = run.status(launch)
        assert after["master_running"]
        assert lasting(after) == lasting(before)
        assert after["status"]["steps"] >= step - 1
        assert launch.pids("worker") == workers
    assert max(absences) < 1.0
    training.wait_for_step(len(undisturbed))
    assert training.losses[: len(undisturbed)] == undisturbed
    assert len(training.starts) == 2
    assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
    launch.end_with(ExitCode.STOPPED)


@pytest.mark.torch
def test_steps_are_made_between_the_death_and_the_return_of_the_master(train) -> None:
    """The launcher is stopped, so that nobody brings the master back."""
    training = train(40, 0.05, "--nproc-per-node=2")
    launch = training.launch
    training.wait_for_step(2)
    launch.process.suspend()
    (master,) = launch.of_kind("master")
    master.kill()
    step = len(training.losses)
    training.wait_for_step(step + 5, timeout=15)
    assert not launch.of_kind("master")
    launch.process.resume()
    launch.succeed()
    assert len(training.starts) == 2
    assert not launch.events_of(events.RestartDecided)


def test_a_job_that_ends_while_the_master_is_away_succeeds(run, tmp_path) -> None:
    launch = run("--local-nodes=2", run.scripts / "wait_for_file.py", tmp_path / "go")
    launch.wait_for("worker", 2)
    launch.process.suspend()
    (master,) = launch.of_kind("master")
    master.kill()
    (tmp_path / "go").touch()
    run.until(lambda: not launch.of_kind("worker"), 5, "the workers' end")
    launch.process.resume()
    launch.succeed()
    assert not launch.events_of(events.RestartDecided)


def test_a_master_that_dies_after_a_long_quiet_time_is_waited_for(run, tmp_path) -> None:
    """Its absence counts from its death, not from its last message."""
    options = ["--rdzv-conf", "master_timeout=6"]
    launch = run(*options, run.scripts / "wait_for_file.py", tmp_path / "go")
    launch.wait_for("worker")
    time.sleep(6.5)
    launch.process.suspend()
    (master,) = launch.of_kind("master")
    master.kill()
    time.sleep(0.7)
    launch.process.resume()
    launch.until(lambda: launch.events_of(events.MasterRecovered), 10, "a new master")
    (tmp_path / "go").touch()
    launch.succeed()
    assert not launch.events_of(events.RestartDecided)


def test_the_master_may_die_before_the_first_round_is_complete(run) -> None:
    port = run.free_port()
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    host = run(*meeting, "--rdzv-id=x", run.scripts / "hello.py", name="host")
    host.until(lambda: host.events_of(events.NodeConnected), 10, "the first node")
    kill_master(host)
    guest = run(*meeting, "--rdzv-id=x", run.scripts / "hello.py", name="guest")
    assert sorted([host.succeed(), guest.succeed()]) == [
        "hello from rank 0 of 2\n",
        "hello from rank 1 of 2\n",
    ]
    (completed,) = host.events_of(events.RoundCompleted)
    assert completed.body.nodes == 2


def test_the_master_may_die_while_a_failure_is_being_handled(run, tmp_path) -> None:
    """A worker is killed; while the other worker takes its time to leave, the master is, too."""
    out = tmp_path / "out"
    out.mkdir()
    launch = run("--local-nodes=2", run.scripts / "slow_to_leave.py", out)
    run.until(lambda: len(list(out.glob("ready-0-*"))) == 2, 10, "two workers")
    launch.of_kind("worker")[0].kill()
    run.until(lambda: list(out.glob("leaving-*")), 5, "the other worker's signal")
    absence = kill_master(launch) / allowed()
    run.until(lambda: len(list(out.glob("ready-1-*"))) == 2, 15, "two new workers")
    (out / "end").touch()
    launch.succeed()
    assert absence < 1.0
    assert len(launch.events_of(events.RestartDecided)) == 1
    assert len(launch.events_of(events.RoundCompleted)) == 2


def test_the_master_may_die_again_and_again(run, tmp_path) -> None:
    launch = run(run.scripts / "wait_for_file.py", tmp_path / "go")
    launch.wait_for("worker")
    workers = launch.pids("worker")
    for _ in range(5):
        kill_master(launch)
    (tmp_path / "go").touch()
    launch.succeed()
    assert workers
    assert not launch.events_of(events.RestartDecided)


def taken(host: str, port: int) -> contextlib.AbstractContextManager:
    """Takes a port, unless another process has it already: a kernel may give a closed one to any connection."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return contextlib.nullcontext()


def test_the_next_master_listens_elsewhere_if_its_port_is_taken(run, tmp_path) -> None:
    launch = run("--local-nodes=2", run.scripts / "wait_for_file.py", tmp_path / "go")
    launch.wait_for("worker", 2)
    workers = launch.pids("worker")
    host, _, port = json.loads((launch.job_dir / "master.json").read_text())["address"].partition(
        ":"
    )
    launch.process.suspend()
    (master,) = launch.of_kind("master")
    master.kill()
    run.until(lambda: not launch.of_kind("master"), 5, "the master's end")
    with taken(host, int(port)):
        launch.process.resume()
        run.until(
            lambda: (
                launch.events_of(events.MasterRecovered)
                and all(n["connected"] for n in run.status(launch)["status"]["nodes"])
            ),
            15,
            "the nodes' connection to the new master",
        )
        assert launch.pids("worker") == workers
        (tmp_path / "go").touch()
        launch.succeed()
