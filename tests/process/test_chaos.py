"""``dlrover chaos`` as users run it: faults on real processes, told in a table, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dlrover.errors import ExitCode
from dlrover.testing.chaos import network
from dlrover.testing.chaos.guard import MARK, marked
from tests import waiting

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(180)]

ENDLESS = "100000"
STEP_TIME = "0.05"
CHAOS = (sys.executable, "-m", "dlrover.cli.main", "chaos")


class Chaos:
    """One ``dlrover chaos`` on ``scripts/train.py``."""

    def __init__(self, run, *options: str | Path) -> None:
        self.run = run
        self.out = run.directory / "out"
        self.job_dir = run.directory / "job"
        self.out.mkdir()
        self._mark = ""
        self._error = (run.directory / "error").open("w+b")
        own = ["--job-dir", self.job_dir, "--steps-file", self.out / "losses.jsonl"]
        program = [run.scripts / "train.py", self.out, ENDLESS, STEP_TIME]
        command = [str(word) for word in (*CHAOS, *own, *options, *program)]
        self.process = psutil.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=run.env, stdout=subprocess.PIPE, stderr=self._error, start_new_session=True,
        )  # fmt: skip

    def progress(self) -> str:
        self._error.seek(0)
        return self._error.read().decode()

    def end(self) -> tuple[int, str]:
        """Its exit code and what it printed; no process of the job is left."""
        printed, _ = self.process.communicate(timeout=150)
        assert self.job_processes() == []
        return self.process.returncode, printed.decode()

    def job_processes(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                ended = process.status() == psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if not ended and process.pid != self.process.pid and str(self.job_dir) in words:
                found.append(" ".join(words))
        return found

    def mark(self) -> str:
        """By what all processes of its job are known; it has to have started one."""
        (launcher,) = [p for p in self.process.children() if "dlrover.cli.run.run" in p.cmdline()]
        self._mark = launcher.environ()[MARK]
        return self._mark

    def close(self) -> None:
        for process in marked(self._mark) if self._mark else []:
            process.kill()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(120)
        self.process.stdout.close()
        self._error.close()


@pytest.fixture
def chaos(run) -> Iterator[Callable[..., Chaos]]:
    """Starts ``dlrover chaos``: ``chaos(*options)``."""
    started: list[Chaos] = []

    def start(*options: str | Path) -> Chaos:
        started.append(Chaos(run, *options))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_each_fault_is_seen_and_recovered_from(chaos) -> None:
    faults = "kill-rank,kill-node,kill-master"
    run = chaos("--nodes", 2, "--faults", faults, "--stop", "--assert-recovery", 60, "-o", "json")
    code, printed = run.end()
    assert code == 0, printed + run.progress()
    report = json.loads(printed)
    rank, node, master = report["faults"]
    assert [row["fault"] for row in report["faults"]] == faults.split(",")
    assert f"rank {rank['rank']} was killed by SIGKILL" in rank["verdict"]
    assert f"node {node['node']} was lost" in node["verdict"]
    assert "The master is back" in master["verdict"]
    for row in (rank, node):
        assert 0 <= row["detected"] < row["training_again"]
        assert 0 <= row["steps_lost"] < 100
    assert master["detected"] < 5
    assert (master["training_again"], master["steps_lost"]) == (0.0, 0)
    shown = run.run.dlrover("goodput", "--job-dir", run.job_dir, "-o", "json")
    ledger = json.loads(shown.stdout)
    assert 0 < ledger["goodput_ratio"] < 1
    assert report["goodput"]["goodput_ratio"] == pytest.approx(ledger["goodput_ratio"], abs=1e-3)
    assert [i["kind"] for i in ledger["incidents"]] == ["training", "training", "master"]
    lost = [incident["steps_lost"] for incident in ledger["incidents"]]
    assert [row["steps_lost"] for row in report["faults"]] == lost
    assert lost[2] == 0
    assert ledger["incidents"][2]["title"] == "the master died; training went on"
    assert (report["not_injected"], report["left_behind"], report["unmet"]) == ([], [], [])


def test_a_rank_that_stands_still_is_told_of_and_goes_on_when_the_fault_is_over(chaos) -> None:
    run = chaos(
        "--nodes", 2, "--faults", "hang", "--stop", "--detect-within", 8, "--assert-recovery", 0.1
    )  # what was done before the fault is reported by the time at which steps count
    code, printed = run.end()
    assert code == ExitCode.NOT_MET, printed + run.progress()
    header, row, *rest = printed.splitlines()
    assert header.startswith("fault  target")
    assert row.startswith("hang")
    assert any(line.startswith("Not met: hang (rank ") for line in rest)


@pytest.mark.heavy
def test_a_node_whose_cable_is_pulled_is_given_up_and_replaced(chaos, run) -> None:
    problem = network.why_not()
    if problem:
        pytest.skip(f"no network can be made for each node: {problem}")
    run.env |= {"DLROVER_HEARTBEAT_INTERVAL": "1", "DLROVER_HEARTBEAT_TIMEOUT": "4"}
    job = chaos("--nodes", 2, "--faults", "partition", "--stop", "-o", "json")
    code, printed = job.end()
    assert code == 0, printed + job.progress()
    assert "partition pulls its cable" in job.progress()
    (row,) = json.loads(printed)["faults"]
    assert f"node {row['node']} was lost: it sent no heartbeat for " in row["verdict"]
    assert 2 < row["detected"] < row["training_again"] < 100
    assert psutil.net_if_addrs().keys().isdisjoint({network.BRIDGE, "node0", "node1", "node2"})


def test_killed_by_sigkill_it_leaves_nothing_behind_not_even_what_it_had_stopped(chaos) -> None:
    run = chaos("--nodes", 2, "--faults", "hang", "--detect-within", 60)
    until = time.monotonic() + 60
    while "hang: rank" not in run.progress():
        assert time.monotonic() < until, run.progress()
        time.sleep(0.05)
    mark = run.mark()

    def stopped() -> bool:
        found = []
        for process in marked(mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(process.status())
        return psutil.STATUS_STOPPED in found

    waiting.until(stopped, 10, "a stopped process")
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(40)
    until = time.monotonic() + 15
    while marked(mark):
        assert time.monotonic() < until, marked(mark)
        time.sleep(0.05)


def test_it_ends_its_job_in_an_orderly_way_on_a_signal(chaos) -> None:
    run = chaos("--nodes", 1, "--every", 1000, "--for", 2000)
    until = time.monotonic() + 60
    while "The job trains" not in run.progress():
        assert time.monotonic() < until, run.progress()
        time.sleep(0.05)
    run.process.send_signal(signal.SIGTERM)
    code, _ = run.end()
    assert code == ExitCode.SIGNAL_BASE + signal.SIGTERM
    assert (run.job_dir / "outcome.json").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--faults", "kill-all"], "--faults names kill-all; the faults are kill-rank, kill-node"),
        (["--every", "5"], "--every and --for belong together"),
        (["--faults", "corrupt-checkpoint"], "corrupt-checkpoint needs --checkpoint-dir"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_starts(run, options, sentence) -> None:
    shown = run.dlrover("chaos", "--job-dir", run.directory / "job", *options, "train.py")
    assert shown.returncode == ExitCode.USAGE
    assert sentence in shown.stderr
    assert not (run.directory / "job" / "chaos").exists()
