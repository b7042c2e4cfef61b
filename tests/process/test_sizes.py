"""Nodes with a size, in real control groups: killed for want of memory, replaced before that, gone at the end."""

import json
import os
import signal
from pathlib import Path

import pytest

from dlrover.cli.run.nodes import machine_memory
from dlrover.errors import ConfigurationError
from dlrover.platform import groups
from dlrover.spec import events
from dlrover.spec.failure import Action

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HUNGRY = """
import os, pathlib, time
path = pathlib.Path("step-" + os.environ["RANK"])
first = step = int(path.read_text()) if path.exists() else 0
with open("starts-" + os.environ["RANK"], "a") as starts:
    starts.write(f"{first}\\n")
kept = []
while step < 40:
    step += 1
    if os.environ["RANK"] == "1":
        kept.append(b"x" * (10 << 20))
    new = path.with_suffix(".new")
    new.write_text(str(step))
    new.replace(path)  # it may end at any moment
    time.sleep(0.01)
"""
"""40 steps; rank 1 keeps 10 MiB of each until it starts again."""


@pytest.fixture(autouse=True)
def _allowed() -> None:
    try:
        groups.check()
    except ConfigurationError as error:
        pytest.skip(str(error))


def groups_left(launch) -> list[str]:
    """The control groups of a job's nodes that are still there."""
    folders = (folder for folder, _, _ in os.walk("/sys/fs/cgroup"))  # others come and go meanwhile
    return [folder for folder in folders if os.path.basename(folder) in launch.groups]


def named(launch) -> set[str]:
    """The names of the groups in which a job's nodes run now."""
    found = set()
    for agent in launch.of_kind("agent"):
        text = Path(f"/proc/{agent.pid}/cgroup").read_text()
        found |= {line.rpartition("/")[2] for line in text.splitlines() if "/dlrover-" in line}
    return found


@pytest.fixture
def hungry(run):
    """A job of two nodes whose rank 1 needs more memory than it has."""

    program = run.directory / "hungry.py"
    program.write_text(HUNGRY)
    return run("--local-nodes=2", "--node-memory=256Mi", program, cwd=run.directory)


def test_a_node_that_is_killed_for_want_of_memory_comes_back_with_twice_as_much(run, hungry):
    launch = hungry
    launch.until(lambda: launch.events_of(events.RoundCompleted), 40, "the first round")
    launch.groups = named(launch)
    assert len(launch.groups) == 2
    launch.succeed()
    (decided,) = [event.body for event in launch.events_of(events.RestartDecided)]
    assert (decided.action, decided.cause) == (Action.MORE_MEMORY, "host_oom")
    job = json.loads((launch.job_dir / "job.json").read_text())["job"]
    assert job["most_memory_factor"] == machine_memory() / 2 / (256 << 20)
    failed = launch.events_of(events.WorkerFailed)[0].body.failure
    assert failed.oom_killed
    launched = [event.body for event in launch.events_of(events.NodeLaunched)]
    assert [(node.node, node.replaces, node.memory_factor) for node in launched] == [
        (0, -1, 1.0),
        (1, -1, 1.0),
        (2, failed.node_id, 2.0),
    ]
    first, second = (run.directory / "starts-1").read_text().split()
    assert int(first) == 0
    assert int(second) > 0, "it goes on from its checkpoint"
    assert not groups_left(launch)


@pytest.mark.torch
def test_a_node_gets_more_memory_before_it_is_killed(run):
    out = run.directory / "out"
    out.mkdir()
    conf = "usage_interval=0.2,heartbeat_interval=0.2,memory_horizon=15"
    launch = run(
        *("--local-nodes=1", "--node-memory=768Mi", f"--rdzv-conf={conf}"),
        *(run.scripts / "grows.py", out, "2", "1000"),
    )
    launch.until(
        lambda: len(launch.events_of(events.RoundCompleted)) == 2, 80, "a node with more memory"
    )
    (grows,) = [event.body for event in launch.events_of(events.MemoryGrows)]
    assert grows.ordered
    assert grows.limit == 768 << 20
    assert grows.needed > grows.limit
    bodies = [type(event.body) for event in launch.events]
    connected = len(bodies) - 1 - bodies[::-1].index(events.NodeConnected)
    reopened = len(bodies) - 1 - bodies[::-1].index(events.RoundOpened)
    assert connected < reopened, "the world trains until the other node is there"
    launch.until(lambda: len((out / "starts").read_text().split()) == 2, 40, "the second start")
    first, second = map(int, (out / "starts").read_text().split())
    assert (first, second > 0) == (0, True)
    (node,) = [
        node
        for node in json.loads(
            run.dlrover("nodes", "--job-dir", launch.job_dir, "--output", "json").stdout
        )
        if node["status"] == "running"
    ]
    assert node["id"] == 1
    assert not launch.events_of(events.WorkerFailed)
    assert run.status(launch)["status"]["restarts"] == 0
    plan = run.dlrover("plan", "--job-dir", launch.job_dir).stdout
    assert "node 1 in place of node 0: it is expected to need" in plan
    assert "within 15 s, and has 768 MiB\n  done" in plan
    assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
    launch.wait()


@pytest.mark.torch
@pytest.mark.long
def test_a_server_gets_more_memory_before_it_is_killed(run):
    conf = "usage_interval=1,heartbeat_interval=0.5,memory_horizon=15"
    launch = run(
        *("--nnodes=1", "--local-nodes=1", "--servers=1", "--node-memory=1Gi"),
        *(f"--rdzv-conf={conf}", run.scripts / "server_grows.py", "3"),
    )
    launch.until(
        lambda: len(launch.events_of(events.RoundCompleted)) == 2, 80, "a server with more memory"
    )
    (grows,) = [event.body for event in launch.events_of(events.MemoryGrows)]
    (moved,) = [event.body for event in launch.events_of(events.NodeMigrates)]
    launched = {e.body.node: e.body for e in launch.events_of(events.NodeLaunched)}
    assert grows.node == moved.node
    assert (launched[moved.node].role, launched[moved.successor].role) == ("ps", "ps")
    assert launched[moved.successor].memory_factor * grows.limit >= grows.needed
    assert not launch.events_of(events.WorkerFailed)
    assert run.status(launch)["status"]["restarts"] == 0
    assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
    launch.wait()


SLEEPS = "import time; time.sleep(100)"


def test_a_node_tells_what_it_uses_of_what_it_has(run):
    tool = run.directory / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '0, GPU-0, 83, 12'\n")
    tool.chmod(0o755)
    program = run.directory / "busy.py"
    program.write_text("while True: pass")
    options = ("--node-memory=256Mi", "--node-cpu=0.2")
    conf = "usage_interval=0.3,heartbeat_interval=0.3"
    path = {"PATH": f"{tool.parent}:{run.env['PATH']}"}
    launch = run("--local-nodes=1", *options, f"--rdzv-conf={conf}", program, env=path)

    def known() -> dict:
        shown = run.dlrover("nodes", "--job-dir", launch.job_dir, "--output", "json")
        nodes = json.loads(shown.stdout or "[]")  # none at first
        return nodes[0] if nodes and nodes[0]["cpu"] and nodes[0]["busy"] >= 0 else {}

    node = launch.until(known, 40, "a node that tells what it uses")
    assert node["memory_limit"] == 256 << 20
    assert 0 < node["memory"] < 256 << 20
    assert node["cores"] == 0.2
    assert 0 < node["cpu"] < 0.35
    assert node["busy"] == 0.83
    shown = run.dlrover("nodes", "--job-dir", launch.job_dir).stdout
    assert " of 256 MiB" in shown
    assert " of 0.2 " in shown
    assert "83% busy" in shown


@pytest.mark.parametrize("kinds", [["master"], ["launcher"], ["launcher", "master", "agent"]])
def test_nothing_is_left_of_the_groups_of_a_job_that_was_killed(run, kinds):
    """Those who live on remove them; where nobody does, the next job of this machine."""
    program = run.directory / "sleeps.py"
    program.write_text(SLEEPS)
    launch = run("--local-nodes=2", "--node-memory=256Mi", program)
    launch.wait_for("worker", 2, 40)
    launch.groups = named(launch)
    assert len(launch.groups) == 2
    assert groups_left(launch)
    victims = [process for kind in kinds for process in launch.of_kind(kind)]
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    if kinds == ["master"]:
        launch.wait_for("master", 1)
        assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
        launch.wait()
        assert not groups_left(launch)
    if "agent" in kinds:
        launch.until(lambda: not launch.processes(), 20, "the end of all processes")
        short = run.directory / "short.py"
        short.write_text("")
        run("--local-nodes=1", "--node-memory=256Mi", short, name="next").succeed()
        assert not groups_left(launch)
    launch.until(lambda: not groups_left(launch), 20, "the end of the groups")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--node-memory=1000Ti"], "this machine has"),
        (["--node-cpu=4000"], "--node-cpu 4000: this machine has"),
    ],
)
def test_what_the_machine_does_not_have_is_refused(run, options, sentence):
    program = run.directory / "sleeps.py"
    program.write_text(SLEEPS)
    _, said = run("--local-nodes=2", *options, program).end_with(2)
    assert sentence in said
