"""A dataset leased in shards: whoever dies, the model learns from every sample exactly once an epoch."""

import json
import signal
import time
from collections import Counter

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(120)]

SAMPLES, EPOCHS = 203, 2


class Counting:
    """One run of ``count_samples.py``."""

    def __init__(self, run, out, *options: str, pause: float = 0.05, **settings) -> None:
        out.mkdir(exist_ok=True)
        self.out, self.until = out, run.until
        script = run.scripts / "count_samples.py"
        self.launch = run(*options, script, out, SAMPLES, EPOCHS, pause, **settings)

    def wait_for_steps(self, count: int) -> None:
        path = self.out / "steps-0"
        self.until(
            lambda: path.exists() and len(path.read_text().splitlines()) >= count,
            60,
            f"step {count}",
        )

    def steps(self) -> int:
        return len((self.out / "steps-0").read_text().splitlines())

    def wait_for_a_save_in_memory(self) -> None:
        """Wait until the step before the last one was saved, and not to the storage."""
        steps = self.out / "steps-0"
        self.until(lambda: int(steps.read_text().split()[-1]) % 6 == 5, 60, "step 5 of 6")

    def counts(self) -> Counter[int]:
        self.launch.succeed()
        return Counter(json.loads((self.out / "counts").read_text()))


@pytest.mark.parametrize(
    "shape", [pytest.param("--nproc-per-node=2", marks=pytest.mark.heavy), "--local-nodes=2"]
)
def test_every_sample_counts_once_though_a_worker_and_the_master_are_killed(
    run, tmp_path, shape
) -> None:
    counting = Counting(run, tmp_path / "out", "--standalone", shape)
    launch = counting.launch
    counting.wait_for_steps(7)
    launch.of_kind("worker")[0].kill()
    counting.wait_for_steps(counting.steps() + 5)
    (master,) = launch.wait_for("master")
    master.kill()
    launch.until(lambda: launch.events_of(events.MasterRecovered), 10, "a new master")
    counting.wait_for_steps(counting.steps() + 3)
    counting.wait_for_a_save_in_memory()
    launch.of_kind("worker")[1].kill()
    assert counting.counts() == {EPOCHS: SAMPLES}
    assert len(launch.events_of(events.RestartDecided)) == 2
    assert (counting.out / "began-2-0").read_text() in ("memory", "peer")


def test_every_sample_counts_once_in_a_job_that_goes_on_without_a_lost_rank(run, tmp_path) -> None:
    """A rank that returns would take samples on its way to the others, and learn from none: all start again."""
    counting = Counting(run, tmp_path / "out", "--survive", "--nproc-per-node=2")
    launch = counting.launch
    counting.wait_for_steps(7)
    launch.of_kind("worker")[0].kill()
    assert counting.counts() == {EPOCHS: SAMPLES}
    opened = launch.events_of(events.RoundOpened)
    assert len(opened) == 2
    assert "cannot reach the others' place in the data set" in opened[-1].body.reason


def test_every_sample_counts_once_on_other_numbers_of_ranks(run, tmp_path) -> None:
    out = tmp_path / "out"
    for ranks in (2, 3):
        counting = Counting(run, out, f"--nproc-per-node={ranks}", name=f"of-{ranks}")
        counting.wait_for_steps(8)
        (out / "steps-0").unlink()
        counting.launch.process.terminate()
        counting.launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGTERM)
    last = Counting(run, out, "--nproc-per-node=1", pause=0.0, name="of-1")
    assert last.counts() == {EPOCHS: SAMPLES}
    assert (out / "began-0-0").read_text() in ("memory", "peer", "storage")


@pytest.mark.parametrize(("stopped", "restarts"), [("master", 0), ("worker", 1)])
def test_who_is_stopped_for_longer_than_the_timeout_goes_on(
    run, tmp_path, stopped, restarts
) -> None:
    """A worker whose shards went to others meanwhile is refused, which is not the program's fault."""
    counting = Counting(
        run, tmp_path / "out", "--standalone", "--nproc-per-node=2", env={"DATA_TIMEOUT": "4"}
    )
    counting.wait_for_steps(7)
    process = counting.launch.of_kind(stopped)[0]
    process.suspend()
    time.sleep(6)
    process.resume()
    assert counting.counts() == {EPOCHS: SAMPLES}
    assert len(counting.launch.events_of(events.RestartDecided)) == restarts


def test_a_master_that_lost_its_journal_refuses_the_workers_and_they_go_on(run, tmp_path) -> None:
    options = "--standalone", "--nproc-per-node=2", "--rdzv-conf=journal=memory:"
    counting = Counting(run, tmp_path / "out", *options)
    launch = counting.launch
    counting.wait_for_steps(7)
    (master,) = launch.of_kind("master")
    master.kill()
    assert counting.counts() == {EPOCHS: SAMPLES}
    (decided,) = launch.events_of(events.RestartDecided)
    assert "The master knows no data set data" in decided.sentence()


def test_reading_processes_count_too(run, tmp_path) -> None:
    """Of what they have read ahead, nothing counts that the model did not get."""
    env = {"LOADER_WORKERS": "2"}
    counting = Counting(run, tmp_path / "out", "--standalone", "--nproc-per-node=2", env=env)
    counting.wait_for_steps(7)
    counting.launch.of_kind("worker")[0].kill()
    assert counting.counts() == {EPOCHS: SAMPLES}
