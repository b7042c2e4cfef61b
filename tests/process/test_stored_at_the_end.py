"""Steps in memory only: a job or a node that ends from outside stores them first, whatever the options."""

import shutil
import signal
from pathlib import Path

import pytest

from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import open_store
from dlrover.errors import ExitCode
from dlrover.rpc.messages import WORKERS_ENDED
from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(180)]

NODES = ["--nnodes=2", "--local-nodes=2"]
LATER = 100_000
"""More steps than a test waits for."""


class Scaled:
    """Jobs of `scripts/scaled.py`, one after the other, whose state is spread over all ranks."""

    def __init__(self, run) -> None:
        self._run = run
        self.out: Path = run.directory / "out"
        self.out.mkdir()
        self.checkpoints = self.out / "steps-in-memory"

    def start(self, *options: str, steps: int = LATER, name: str = "run"):
        program = [self._run.scripts / "scaled.py", self.out, steps, 0.05]
        return self._run(*options, *program, name=name)

    def done(self) -> list[int]:
        """Steps that were completed, in order."""
        return [int(words[0]) for words in self._lines("steps")]

    def stored(self) -> int:
        """The newest stored step."""
        return max(storage.steps(open_store(str(self.checkpoints))), default=0)

    def starts(self) -> list[list[str]]:
        """World size, first step and source of each start."""
        return self._lines("starts")

    def _lines(self, name: str) -> list[list[str]]:
        path = self.out / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def reach(self, launch, starts: int, more: int = 5) -> int:
        """Wait for some steps of a start; return the last."""
        launch.until(lambda: len(self.starts()) == starts, 60, f"start {starts}")
        first = int(self.starts()[-1][1])
        launch.until(lambda: self.done() and self.done()[-1] >= first + more, 60, "steps")
        return self.done()[-1]


@pytest.fixture
def scaled(run) -> Scaled:
    return Scaled(run)


@pytest.mark.parametrize("how", ["command", "SIGTERM"])
def test_a_stopped_job_stores_the_step_that_it_was_at(run, scaled, how: str) -> None:
    launch = scaled.start(*NODES)
    scaled.reach(launch, 1)
    if how == "command":
        assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
        _, stderr = launch.end_with(ExitCode.STOPPED)
    else:
        launch.process.send_signal(signal.SIGTERM)
        _, stderr = launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGTERM)
    stored = scaled.stored()
    assert stored >= scaled.done()[-1] - 1, "a step that not all ranks had saved is lost"
    said = f"dlrover: Step {stored} is stored in {scaled.checkpoints}: the workers have ended.\n"
    assert stderr.count(said) == 1
    (recorded,) = launch.events_of(events.StepStored)
    assert recorded.body == events.StepStored(str(scaled.checkpoints), stored, WORKERS_ENDED)


def test_a_stopped_job_tells_why_it_stores_nothing(run, scaled) -> None:
    launch = scaled.start()
    scaled.reach(launch, 1)
    shutil.rmtree(scaled.checkpoints)
    scaled.checkpoints.touch()
    launch.process.send_signal(signal.SIGTERM)
    _, stderr = launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGTERM)
    assert (
        f"dlrover: Nothing new is stored in {scaled.checkpoints} (the workers have ended): "
        "The storage failed: Not a directory.\n"
    ) in stderr
    (recorded,) = launch.events_of(events.StepStored)
    assert recorded.body.problem == "The storage failed: Not a directory."


@pytest.mark.parametrize("whole", [False, True], ids=["agent", "all its processes"])
def test_a_node_that_is_stopped_costs_no_step(run, scaled, whole: bool) -> None:
    launch = scaled.start(*NODES)
    scaled.reach(launch, 1)
    agent = max(launch.of_kind("agent"), key=lambda process: process.create_time())
    for process in [agent, *(agent.children(recursive=True) if whole else ())]:
        process.send_signal(signal.SIGTERM)
    scaled.reach(launch, 2)

    assert [start[::2] for start in scaled.starts()] == [["2", "nowhere"], ["2", "storage"]]
    repeated = len(scaled.done()) - len(set(scaled.done()))
    assert repeated <= 1, "a step that not all ranks have saved is made again"
    (opened,) = [event.body.reason for event in launch.events_of(events.RoundOpened)][1:]
    # The report on a worker that got the signal, too, may be the first.
    (lost,) = launch.events_of(events.NodeLost)
    why = f"node {lost.body.node} leaves: the agent was stopped by SIGTERM"
    assert opened == why or whole
    (recorded,) = launch.events_of(events.StepStored)
    assert recorded.body.step == int(scaled.starts()[-1][1])
    launch.process.send_signal(signal.SIGTERM)
    launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGTERM)
