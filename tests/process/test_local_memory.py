"""Nodes on one machine have memory checkpoints of their own, as machines have."""

from pathlib import Path

import psutil
import pytest

from dlrover.errors import ExitCode
from dlrover.spec.events import SpareReady, SpareTakesPlace, StepStored

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(150)]


@pytest.fixture
def out(run) -> Path:
    made = run.directory / "out"
    made.mkdir()
    return made


def savers(launch) -> list[psutil.Process]:
    return [p for p in launch.processes() if "dlrover.checkpoint.saver.saver" in p.cmdline()]


def until_step(run, out: Path, step: int) -> None:
    files = [out / f"step-{rank}" for rank in (0, 1)]

    def made() -> bool:
        return all(file.exists() and int(file.read_text() or 0) >= step for file in files)

    run.until(made, 60, f"step {step}")


def kill_node(launch) -> None:
    """As `dlrover chaos` does: the agent and its saver."""
    agent = launch.of_kind("agent")[-1]
    held = [p for p in agent.children() if "dlrover.checkpoint.saver.saver" in p.cmdline()]
    for process in (agent, *held):
        process.kill()


def test_a_lost_local_node_has_its_memory_with_another_one(run, out) -> None:
    launch = run("--local-nodes=2", run.scripts / "in_memory.py", out, 1, 60)
    until_step(run, out, 15)
    assert len(savers(launch)) == 2
    kill_node(launch)
    launch.succeed(90)
    began = [(out / f"from-1-{rank}").read_text() for rank in (0, 1)]
    assert all(int(line.split()[0]) >= 10 for line in began)
    assert "peer" in "".join(began)


def test_without_a_replica_it_is_lost(run, out) -> None:
    launch = run("--local-nodes=2", run.scripts / "in_memory.py", out, 0, 1000)
    until_step(run, out, 5)
    kill_node(launch)
    _, told = launch.end_with(ExitCode.INFRASTRUCTURE, 90)
    assert "was saved to memory, and the part of rank" in told


def test_what_a_user_has_stored_is_not_lost(run, out) -> None:
    launch = run("--local-nodes=2", run.scripts / "in_memory.py", out, 0, 1000)
    until_step(run, out, 5)
    done = run.dlrover("ckpt", "save", "--job-dir", launch.job_dir, "--reason", "before the night")
    assert done.returncode == 0, done.stderr
    (stored,) = launch.events_of(StepStored)
    assert done.stdout == f"{stored.body.sentence()}\n"
    assert (stored.body.directory, stored.body.reason) == (
        str(out / "checkpoints"),
        "before the night",
    )
    kill_node(launch)
    run.until(lambda: all((out / f"from-1-{rank}").exists() for rank in (0, 1)), 90, "a start")
    assert (out / "from-1-1").read_text() == f"{stored.body.step} storage"


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(["--nproc-per-node=2"], marks=pytest.mark.heavy),
        pytest.param(["--local-nodes=2"], marks=pytest.mark.heavy),
        ["--local-nodes=2", "--spares=1"],
    ],
)
def test_the_node_in_place_of_one_whose_agent_died_finds_its_memory(run, out, shape) -> None:
    launch = run(*shape, run.scripts / "in_memory.py", out, 0, 60)
    until_step(run, out, 5)
    spare = len(shape) > 1
    run.until(lambda: not spare or launch.events_of(SpareReady), 30, "a spare")
    launch.of_kind("agent")[-2 if spare else -1].kill()
    launch.succeed(90)
    assert len(launch.events_of(SpareTakesPlace)) == spare
    began = [(out / f"from-1-{rank}").read_text() for rank in (0, 1)]
    assert all(int(line.split()[0]) >= 4 and line.endswith("memory") for line in began)


def test_each_of_two_launches_on_one_machine_has_a_saver(run, out) -> None:
    options = ["--nnodes=2", f"--rdzv-endpoint=localhost:{run.free_port()}", "--rdzv-id=pair"]
    launches = [
        run(*options, run.scripts / "in_memory.py", out, 0, 0, name=f"node-{n}",
            env={"DLROVER_TOKEN": "of this job"})
        for n in (0, 1)
    ]  # fmt: skip
    run.until(lambda: all((out / f"from-0-{rank}").exists() for rank in (0, 1)), 60, "a world")
    assert [len(savers(launch)) for launch in launches] == [1, 1]
    (out / "go").touch()
    for launch in launches:
        launch.succeed()
