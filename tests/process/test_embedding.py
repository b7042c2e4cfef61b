"""``dlrover-run --embedding-servers``: a killed server has the saved rows again; others come and go; a hot one cools."""

import os
import signal

import pytest

from dlrover.spec import events

FIRST_SERVER = 1 << 20
"""Wanted rank of server 0, an argument of its agent."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def servers(launch, index: int) -> list[int]:
    """Return the pid of a server's process, if it runs."""
    agents = [p for p in launch.of_kind("agent") if p.cmdline()[-1] == str(FIRST_SERVER + index)]
    workers = {p.pid for p in launch.of_kind("worker")}
    return [p.pid for agent in agents for p in agent.children(True) if p.pid in workers]


def test_servers_are_killed_added_and_hot_and_no_saved_row_is_lost(run) -> None:
    out = run.directory / "out"
    out.mkdir()
    run.env["DLROVER_HOT_SERVER_WINDOW"] = "4"
    launch = run("--embedding-servers=2", run.scripts / "embedding.py", out)
    launch.until((out / "saved").exists, 60, "a saved step")

    listed = [path.read_text() for path in launch.job_dir.glob("logs/*/attempt_0/modules.json")]
    assert "numpy" in "".join(listed), "the next start of a server is a fork with it"
    os.kill(servers(launch, 1)[0], signal.SIGKILL)
    launch.until(lambda: launch.events_of(events.InstanceRestarts), 30, "a server's restart")
    (master,) = launch.of_kind("master")
    master.kill()
    run.dlrover("scale", "--job-dir", launch.job_dir, "--role", "ps", "--nodes", 3)
    launch.until(lambda: servers(launch, 2), 30, "a third server")
    (out / "go").touch()
    launch.succeed()
    rows, expected = map(int, (out / "rows").read_text().split())
    assert rows == expected > 4000
    assert len(launch.events_of(events.RoundOpened)) == 1, "the worker was never restarted"
    before, after = map(float, (out / "hottest").read_text().split())
    assert before > 1.5
    assert after <= 1.4
    first, *_ = launch.events_of(events.HotServer)
    assert first.body.server == 0
    assert first.body.slots < 60, "few slots are enough"


def test_a_server_that_is_killed_while_it_leaves_takes_no_saved_row_with_it(run) -> None:
    out = run.directory / "out"
    out.mkdir()
    run.env["DLROVER_HOT_SERVER_WINDOW"] = "4"
    launch = run("--embedding-servers=4", run.scripts / "embedding.py", out)
    launch.until((out / "saved").exists, 60, "a saved step")
    *stay, leaves = [pid for index in range(4) for pid in servers(launch, index)]
    for pid in stay:
        os.kill(pid, signal.SIGSTOP)  # so that it takes no slots before the other is dead
    run.dlrover("scale", "--job-dir", launch.job_dir, "--role", "ps", "--nodes", 3)
    os.kill(leaves, signal.SIGKILL)
    launch.until(lambda: launch.events_of(events.NodeReleased), 30, "the end of its node")
    for pid in stay:
        os.kill(pid, signal.SIGCONT)
    (out / "go").touch()
    launch.succeed()
    rows, expected = map(int, (out / "rows").read_text().split())
    assert rows == expected > 4000


def test_embedding_servers_exclude_servers(run) -> None:
    launch = run(
        "--embedding-servers=2", "--servers=1", run.scripts / "embedding.py", run.directory
    )
    _, error = launch.end_with(2)
    assert "--embedding-servers 2: excludes --servers 1." in error


def test_servers_end_with_the_launcher(run) -> None:
    out = run.directory / "out"
    out.mkdir()
    launch = run("--embedding-servers=2", run.scripts / "embedding.py", out)
    launch.until((out / "saved").exists, 60, "a saved step")
    launch.process.kill()  # the end of the test checks that nothing stays behind
