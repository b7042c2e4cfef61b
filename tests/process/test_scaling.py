"""``dlrover scale``: a running job gets more nodes, then fewer, and goes on from the step that it was at."""

import json

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SIZE = 12
"""Numbers in the state of `scripts/scaled.py`."""


def scale(run, launch, nodes: int) -> str:
    """What ``dlrover scale`` prints."""
    done = run.dlrover("scale", "--job-dir", launch.job_dir, "--nodes", nodes)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def rounds(launch) -> list[int]:
    return [event.body.nodes for event in launch.events_of(events.RoundCompleted)]


@pytest.mark.torch
@pytest.mark.long
def test_a_job_grows_from_two_nodes_to_four_and_shrinks_to_one_without_losing_a_step(run) -> None:
    """The state is spread over all ranks, and in memory only: who leaves has to store its part."""
    out = run.directory / "out"
    out.mkdir()
    total = 150
    program = [run.scripts / "scaled.py", out, total, 0.1]
    launch = run("--nnodes=2", "--local-nodes=2", *program)

    def steps(nodes: int = 0) -> list[int]:
        """The steps that were completed, by worlds of so many nodes."""
        lines = (out / "steps").read_text().splitlines() if (out / "steps").exists() else []
        done = [tuple(map(int, line.split())) for line in lines]
        return [step for step, world_size in done if nodes in (0, world_size)]

    run.until(lambda: len(steps(2)) >= 5, 60, "steps of two nodes")
    assert scale(run, launch, 4).startswith("The job will have 4 nodes instead of 2: ")
    run.until(lambda: len(steps(4)) >= 5, 60, "steps of four nodes")
    assert scale(run, launch, 1).startswith("The job will have 1 node instead of 4: ")
    printed = launch.succeed(120)

    assert printed == f"sum {SIZE * total * (total + 1) // 2} after step {total}\n"
    done = steps()
    assert set(done) >= set(range(1, total + 1)) - {steps(4)[0] - 1, steps(1)[0] - 1}
    # A step that not all ranks had saved when they were interrupted is made again.
    assert len(done) - len(set(done)) <= 2
    starts = (out / "starts").read_text().splitlines()
    assert [line.split()[0] for line in starts] == ["2", "4", "1"]
    assert starts[2].split()[2] == "storage"
    assert launch.events_of(events.RestartDecided) == []
    assert launch.events_of(events.NodeLost) == []
    assert sorted(e.body.node for e in launch.events_of(events.NodeReleased)) == [1, 2, 3]


def test_nodes_that_leave_are_gone_and_the_job_ends_well(run, tmp_path) -> None:
    program = [run.scripts / "wait_for_file.py", tmp_path / "go"]
    launch = run("--nnodes=3", "--local-nodes=3", *program)
    run.until(lambda: rounds(launch) == [3], 20, "a world of three")
    shown = run.dlrover(
        "scale", "--job-dir", launch.job_dir, "--nodes", 1, "--reason", "night", "--output", "json"
    )
    assert json.loads(shown.stdout)["nodes"] == 1
    run.until(lambda: rounds(launch) == [3, 1], 20, "a world of one")
    assert len(launch.of_kind("agent")) == 1
    told = "dlrover: The job will have 1 node instead of 3: night."
    run.until(lambda: told in launch.stderr, 5, "a line on the job's own terminal")
    assert [e.body.reason for e in launch.events_of(events.JobScaled)] == ["night"]
    assert scale(run, launch, 1) == "The job is set to 1 node already; nothing changes."
    (tmp_path / "go").touch()
    launch.succeed()


def test_the_master_of_a_scaled_job_may_die(run, tmp_path) -> None:
    program = [run.scripts / "wait_for_file.py", tmp_path / "go"]
    launch = run("--nnodes=1", "--local-nodes=1", *program)
    run.until(lambda: rounds(launch) == [1], 20, "a world of one")
    scale(run, launch, 2)
    run.until(lambda: rounds(launch) == [1, 2], 20, "a world of two")
    (master,) = launch.of_kind("master")
    master.kill()
    run.until(lambda: launch.events_of(events.MasterRecovered), 20, "another master")
    launch.of_kind("agent")[-1].kill()
    run.until(lambda: rounds(launch)[-2:] == [1, 2], 20, "a world of two again")
    (tmp_path / "go").touch()
    launch.succeed()


def test_what_cannot_be_is_refused_in_one_sentence(run, tmp_path) -> None:
    def refused(*options) -> str:
        done = run.dlrover("scale", "--job-dir", launch.job_dir, *options)
        assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
        return done.stderr.strip()

    program = [run.scripts / "wait_for_file.py", tmp_path / "go"]
    endpoint = f"--rdzv-endpoint=localhost:{run.free_port()}"
    launch = run("--nnodes=1:2", "--rdzv-conf=last_call_timeout=0.2", endpoint,
                 *program, env={"DLROVER_TOKEN": "of this job"})  # fmt: skip
    run.until(lambda: rounds(launch) == [1], 20, "a world of one")
    assert refused("--nodes", 2) == (
        "dlrover: The job's nodes come by themselves: start or stop dlrover-run on a machine to "
        "change their number."
    )
    assert "'--nodes'" in refused("--nodes", "two")
    (tmp_path / "go").touch()
    launch.succeed()
    assert refused("--nodes", 2).startswith(f"dlrover: The job in {launch.job_dir} has ended: ")
