"""Worlds that shrink and grow: nodes of one machine, and nodes that were started by themselves."""

import re
import time

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

FIRST_STEP_WITHIN = 3.0
"""Seconds from the death of a node; the project's promise."""
TOKEN = {"DLROVER_TOKEN": "of this job"}


def rounds(launch) -> list[int]:
    """Nodes of each world so far."""
    return [event.body.nodes for event in launch.events_of(events.RoundCompleted)]


def wait_for_rounds(launch, nodes: list[int], timeout: float = 20.0) -> None:
    launch.until(lambda: len(rounds(launch)) >= len(nodes), timeout, f"rounds of {nodes} nodes")
    assert rounds(launch) == nodes


@pytest.mark.torch
@pytest.mark.long
def test_a_lost_node_costs_two_rounds_and_few_seconds(run, train) -> None:
    """One without it, at once; one with its replacement."""
    conf = "--rdzv-conf=scale_up_delay=2"
    training = train(400, 0.1, "--nnodes=2:4", "--local-nodes=4", conf)
    launch = training.launch
    wait_for_rounds(launch, [4])
    launch.until(lambda: warm_zygotes(launch) == 4, 60, "a warm zygote of each agent")
    training.wait_for_step(10)
    victim = launch.of_kind("agent")[-1]
    began = time.time()
    victim.kill()
    wait_for_rounds(launch, [4, 3])
    run.until(lambda: len(training.starts) == 7, 20, "three new workers")
    run.until(lambda: launch.events_of(events.Recovered), 20, "a step")
    assert launch.events_of(events.Recovered)[0].time - began < FIRST_STEP_WITHIN
    wait_for_rounds(launch, [4, 3, 4])
    run.until(lambda: training.losses[-1][2] == 4, 60, "a step of four workers")
    assert rounds(launch) == [4, 3, 4]
    assert len(training.starts) == 4 + 3 + 4
    assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
    launch.end_with(ExitCode.STOPPED)


def warm_zygotes(launch) -> int:
    """Zygotes that have imported the program's modules; an agent has a cold one too if no run has listed them yet."""
    logs = "".join(path.read_text() for path in launch.job_dir.glob("agent-*.log"))
    ready = {int(pid) for pid in re.findall(r"Zygote (\d+) is ready after", logs)}
    return sum(
        ".json'" in " ".join(process.cmdline())
        for process in launch.of_kind("zygote")
        if process.pid in ready
    )


class Cluster:
    """Launches on this machine that meet at one endpoint; the first one runs the master."""

    def __init__(self, run, nnodes: str, *options: str) -> None:
        self._run = run
        endpoint = f"--rdzv-endpoint=localhost:{run.free_port()}"
        self._options = [f"--nnodes={nnodes}", "--rdzv-backend=c10d", endpoint, *options]

    def add(self, name: str, *program, env=TOKEN):
        return self._run(*self._options, "--rdzv-id=cluster", *program, name=name, env=env)


def test_nodes_come_and_go(run, tmp_path) -> None:
    """Two of at most three start; one is killed, two more come."""
    program = [run.scripts / "wait_for_file.py", tmp_path / "go"]
    conf = "--rdzv-conf=last_call_timeout=4,scale_up_delay=0.5,reconnect_grace=0.5"
    cluster = Cluster(run, "1:3", conf)
    host = cluster.add("host", *program)
    host.until(lambda: host.events_of(events.NodeConnected), 10, "the host's node")
    second = cluster.add("second", *program)
    run.until(lambda: rounds(host)[-1:] == [2], 20, "a world of two")
    before = rounds(host)
    assert before in ([2], [1, 2])  # the second one may be late
    second.process.kill()
    wait_for_rounds(host, [*before, 1])
    newcomers = [cluster.add(name, *program) for name in ("third", "fourth")]
    run.until(lambda: rounds(host)[-1] == 3, 20, "a world of three")
    assert rounds(host)[len(before) :] in ([1, 3], [1, 2, 3])  # they may come one by one
    (tmp_path / "go").touch()
    for launch in (host, *newcomers):
        launch.succeed()
    assert len(host.events_of(events.RestartDecided)) == 1


def test_a_wrong_token_harms_nobody_else(run, tmp_path) -> None:
    program = [run.scripts / "wait_for_file.py", tmp_path / "go"]
    cluster = Cluster(run, "1:2", "--rdzv-conf=last_call_timeout=0.5")
    host = cluster.add("host", *program)
    wait_for_rounds(host, [1])
    stranger = cluster.add("stranger", *program, env={"DLROVER_TOKEN": "of another job"})
    _, stderr = stranger.end_with(ExitCode.USAGE, timeout=40)
    assert "The token is missing or is not this job's." in stderr.splitlines()[0]
    assert "Traceback" not in stderr
    (tmp_path / "go").touch()
    host.succeed()
    assert rounds(host) == [1]
    assert len(host.events_of(events.NodeConnected)) == 1


def test_all_nodes_of_a_cluster_tell_why_it_ended(run) -> None:
    cluster = Cluster(run, "2")
    program = ["--nproc-per-node=1", run.scripts / "fails.py", "exception"]
    nodes = [cluster.add(name, *program) for name in ("host", "guest")]
    for node in nodes:
        _, stderr = node.end_with(ExitCode.USER_CODE)
        assert "rank 1 raised ValueError" in stderr
        assert "the batch is empty" in stderr


def test_launches_on_one_machine_agree_on_who_runs_the_master(run) -> None:
    """They are started at once; each would do it."""
    cluster = Cluster(run, "2")
    outputs = [
        node.succeed()
        for node in [cluster.add(name, run.scripts / "hello.py") for name in ("one", "two")]
    ]
    assert sorted(outputs) == ["hello from rank 0 of 2\n", "hello from rank 1 of 2\n"]


def test_node_ranks_are_as_asked_for(run) -> None:
    cluster = Cluster(run, "2")
    first = cluster.add("one", "--node-rank=1", run.scripts / "hello.py")
    first.wait_for("zygote")
    second = cluster.add("two", "--node-rank=0", run.scripts / "hello.py")
    assert first.succeed() == "hello from rank 1 of 2\n"
    assert second.succeed() == "hello from rank 0 of 2\n"


def test_a_world_has_a_multiple_of_the_node_unit(run, tmp_path) -> None:
    program = [run.scripts / "wait_for_file.py", tmp_path / "go"]
    launch = run("--nnodes=2:4", "--local-nodes=4", "--node-unit=2",
                 "--rdzv-conf=scale_up_delay=0.2", *program)  # fmt: skip
    wait_for_rounds(launch, [4])
    launch.of_kind("agent")[0].kill()
    launch.until(lambda: rounds(launch)[1:] and rounds(launch)[-1] == 4, 60, "four nodes again")
    assert set(rounds(launch)) <= {2, 4}  # a busy master sees the replacement before a round of two
    (tmp_path / "go").touch()
    launch.succeed()
