"""``dlrover-run --server-failover instance``: each server restarts, moves and is added alone."""

import os
import signal

import pytest

from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
SECOND_SERVER = "1048577"
"""Wanted rank of server 1, an argument of its agent."""


def test_servers_are_killed_and_added_and_the_workers_are_not_interrupted(run) -> None:
    out = run.directory / "out"
    out.mkdir()
    launch = run(
        "--local-nodes=2",
        "--servers=2",
        "--server-failover=instance",
        run.scripts / "instances.py",
        out,
    )

    def lines(name: str) -> list[list[str]]:
        path = out / name
        return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def servers(index: int) -> list[list[str]]:
        return [words[1:] for words in lines("starts") if words[:2] == ["ps", str(index)]]

    launch.until(lambda: len(lines("starts")) == 4 and lines("steps"), 30, "the start of all")
    assert sorted(words[:-1] for words in lines("starts")) == [
        ["ps", "0", "2", "0", "1", "0"],
        ["ps", "1", "2", "0", "1", "0"],
        ["worker", "0", "2", "0", "2", "0"],
        ["worker", "1", "2", "1", "2", "0"],
    ]

    os.kill(int(servers(1)[0][-1]), signal.SIGKILL)
    launch.until(lambda: len(servers(1)) == 2, 20, "another process of server 1")
    assert servers(1)[1][4] == "1", "its restarts"
    agent = next(p for p in launch.of_kind("agent") if p.cmdline()[-1] == SECOND_SERVER)
    agent.kill()
    launch.until(lambda: len(servers(1)) == 3, 20, "another node of server 1")

    (master,) = launch.of_kind("master")
    master.kill()
    launch.until(lambda: launch.events_of(events.MasterRecovered), 20, "another master")
    os.kill(int(servers(0)[0][-1]), signal.SIGKILL)
    launch.until(lambda: len(servers(0)) == 2, 20, "another process of server 0")

    asked = run.dlrover("scale", "--job-dir", launch.job_dir, "--role", "ps", "--nodes", 3)
    assert asked.stdout.startswith("The job will have 3 ps nodes instead of 2: 1 is being started")
    launch.until(lambda: servers(2), 20, "a third server")
    asked = run.dlrover("scale", "--job-dir", launch.job_dir, "--role", "ps", "--nodes", 1)
    assert asked.stdout.strip() == (
        "The job will have 1 ps node instead of 3: the last 2 leave, and the others go on."
    )
    launch.until(lambda: len(launch.events_of(events.NodeReleased)) == 2, 20, "two servers' end")

    status = run.status(launch)["status"]
    living = [node for node in status["nodes"] if node["status"] == "running"]
    assert [node["role"] for node in living] == ["worker", "worker", "ps"]
    assert (status["restarts"], status["servers"], status["world_size"]) == (0, 1, 2)
    (out / "go").touch()
    launch.succeed()
    assert len({words[0] for words in lines("steps")}) == 1, "worker 0 was never restarted"
    assert len(launch.events_of(events.RoundOpened)) == 1
    restarts = [event.body.index for event in launch.events_of(events.InstanceRestarts)]
    assert restarts == [1, 1, 0]


def test_an_instance_needs_servers(run) -> None:
    launch = run("--server-failover=instance", run.scripts / "instances.py", run.directory)
    _, error = launch.end_with(2)
    assert "--server-failover instance: the job has no servers" in error
