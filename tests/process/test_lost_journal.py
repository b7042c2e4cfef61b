"""A master that has lost its journal goes on with the workers that run."""

import contextlib
import sqlite3

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


NO_GRACE = "--rdzv-conf=recovery_grace=600"
"""A master that waited for nodes that have all come would exceed the limits of these tests."""


def lose_journal(launch) -> None:
    """Kill the master, and delete its journal before another one starts; wait until that has adopted the job."""
    known = len(launch.events_of(events.MasterAdopted))
    launch.process.suspend()  # it starts masters
    (master,) = launch.of_kind("master")
    master.kill()
    launch.until(lambda: not launch.of_kind("master"), 5, "the master's end")
    for file in launch.job_dir.glob("journal.sqlite*"):
        file.unlink()
    launch.process.resume()
    launch.until(
        lambda: len(launch.events_of(events.MasterAdopted)) > known, 20, "the master's return"
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    "shape", [pytest.param("--nproc-per-node=2", marks=pytest.mark.heavy), "--local-nodes=2"]
)
def test_training_goes_on_when_the_journal_is_lost(run, train, undisturbed, shape: str) -> None:
    training = train(1000, 0.1, "--standalone", shape, NO_GRACE)
    launch = training.launch
    training.wait_for_step(3)
    workers, before = launch.pids("worker"), run.status(launch)["status"]
    for _ in range(2):
        step = len(training.losses)
        lose_journal(launch)
        training.wait_for_step(step + 1)
        run.until(lambda s=step: run.status(launch)["status"]["steps"] > s, 10, "reported steps")
        after = run.status(launch)["status"]
        assert launch.pids("worker") == workers
        for key in ("phase", "round", "world_size", "restarts", "waiting_for", "name"):
            assert after[key] == before[key]
        assert [n["id"] for n in after["nodes"]] == [n["id"] for n in before["nodes"]]
        assert [n["node_rank"] for n in after["nodes"]] == [n["node_rank"] for n in before["nodes"]]
    # What was adopted is a job like any other: a fault costs one round, and the platform replaces nodes.
    launch.of_kind("agent")[0].kill()
    run.until(lambda: len(launch.events_of(events.Recovered)) == 1, 30, "the recovery")
    assert run.status(launch)["status"]["round"] == 2
    training.wait_for_step(len(undisturbed))
    assert training.losses[: len(undisturbed)] == undisturbed
    assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
    launch.end_with(ExitCode.STOPPED)
    assert [e.seq for e in launch.events] == list(range(1, len(launch.events) + 1))
    assert len(launch.events_of(events.JobSubmitted)) == 1


@pytest.mark.torch
def test_a_job_that_lost_its_journal_ends_with_the_undisturbed_result(train, undisturbed) -> None:
    training = train(len(undisturbed), 0.2, "--standalone", "--local-nodes=2")
    launch = training.launch
    training.wait_for_step(3)
    lose_journal(launch)
    launch.succeed()
    assert training.losses == undisturbed
    assert len(training.starts) == 2
    assert not launch.events_of(events.RestartDecided)


@pytest.mark.torch
def test_a_damaged_journal_is_named_and_set_aside(run, train, undisturbed) -> None:
    """Trying again would fail in the same way, and what the agents know is as much as for a lost one."""
    training = train(len(undisturbed), 0.2, "--standalone", "--local-nodes=2")
    launch = training.launch
    training.wait_for_step(3)
    launch.process.suspend()
    (master,) = launch.of_kind("master")
    master.kill()
    launch.until(lambda: not launch.of_kind("master"), 5, "the master's end")
    journal = launch.job_dir / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(journal)) as database:
        database.execute("UPDATE entries SET body = x'c1' WHERE seq = 3")
        database.commit()
    launch.process.resume()
    launch.succeed()
    assert training.losses == undisturbed
    assert len(training.starts) == 2
    said = f"The journal {journal} is damaged at entry 3"
    kept = f"It is kept as {journal}.damaged-1, and the job goes on with what its agents know."
    assert said in launch.stderr
    assert kept in launch.stderr
    assert (launch.job_dir / "journal.sqlite.damaged-1").exists()
    assert launch.events_of(events.MasterAdopted)


@pytest.mark.torch
def test_with_a_journal_in_memory_the_agents_hold_the_job(run, train) -> None:
    training = train(40, 0.1, "--standalone", "--local-nodes=2", "--rdzv-conf=journal=memory:")
    launch = training.launch
    training.wait_for_step(3)
    workers = launch.pids("worker")
    (master,) = launch.of_kind("master")
    master.kill()
    run.until(lambda: launch.events_of(events.MasterAdopted), 10, "the master's return")
    assert launch.pids("worker") == workers
    assert not list(launch.job_dir.glob("journal*"))
    launch.succeed()
    assert len(training.starts) == 2


def test_workers_that_end_while_the_journal_is_lost_end_the_job(run, tmp_path) -> None:
    launch = run("--local-nodes=2", run.scripts / "wait_for_file.py", tmp_path / "go")
    launch.wait_for("worker", 2)
    launch.process.suspend()
    (master,) = launch.of_kind("master")
    master.kill()
    for file in launch.job_dir.glob("journal.sqlite*"):
        file.unlink()
    (tmp_path / "go").touch()
    run.until(lambda: not launch.of_kind("worker"), 5, "the workers' end")
    launch.process.resume()
    launch.succeed()
    assert not launch.events_of(events.RestartDecided)
    assert len(launch.events_of(events.NodeLaunched)) == 2
