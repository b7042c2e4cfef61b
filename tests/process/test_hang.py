"""Hangs are found with evidence, and only hangs; slow ranks are named."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(120)]

QUICK = "heartbeat_interval=0.3,hang_step_limit=2,hang_data_limit=2,hang_sample_gap=1"
"""Limits that a hang of a test exceeds soon; those of longer activities stay as they are."""
SCRIPT = Path(__file__).parent / "scripts" / "hangs.py"


def line_of(text: str) -> int:
    """The number of the script's line that is ``text``."""
    return [line.strip() for line in SCRIPT.read_text().splitlines()].index(text) + 1


@pytest.fixture
def training(run):
    """Starts ``scripts/hangs.py`` with a fault: ``training(fault, *options, conf=...)``."""

    def start(fault: str, *options: str, conf: str = QUICK, **more):
        out = run.directory / "out"
        out.mkdir(exist_ok=True)
        return run(*options, "--rdzv-conf", conf, SCRIPT, out, fault, **more)

    return start


def without_py_spy() -> str:
    """The search path without the debugger, so that the workers write their stacks themselves."""
    parts = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(part for part in parts if not (Path(part) / "py-spy").exists())


def waiting_accelerators(run) -> Path:
    """A folder with an ``nvidia-smi`` that tells of busy devices that move nothing."""
    folder = run.directory / "tools"
    folder.mkdir()
    tool = folder / "nvidia-smi"
    lines = "".join(f"{index}, GPU-{index}, 100, 0\n" for index in range(3))
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}END\n")
    tool.chmod(0o755)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("by", ["py-spy", pytest.param("faulthandler", marks=pytest.mark.heavy)])
@pytest.mark.parametrize(
    ("fault", "shape"),
    [
        ("sleep", ["--nproc-per-node=3"]),
        pytest.param("spin", ["--local-nodes=2"], marks=pytest.mark.heavy),
    ],
)
def test_a_hang_is_reported_with_rank_and_line_and_restarted(
    run, training, fault: str, shape: list[str], by: str
) -> None:
    path = without_py_spy() if by == "faulthandler" else os.environ["PATH"]
    launch = training(fault, *shape, env={"PATH": f"{waiting_accelerators(run)}:{path}"})
    _, shown = launch.end_with(0, 100)
    (found,) = (event.body for event in launch.events_of(events.HangFound))
    last = 1 if fault == "spin" else 2
    line = "count += 1" if fault == "spin" else "time.sleep(1000)"
    function = "spin" if fault == "spin" else "__getitem__"
    assert found.ranks == (last,)
    assert found.nodes == ((1,) if fault == "spin" else (0,))
    near = range(line_of(line) - (fault == "spin"), line_of(line) + 1)
    assert re.search(rf"{function} \(hangs\.py:({'|'.join(map(str, near))})\)$", found.place)
    assert found.evidence == "evidence/1.txt"
    assert f"rank {last} in " in found.sentence()
    assert found.sentence() in shown
    text = (launch.job_dir / found.evidence).read_text()
    assert found.groups in text
    assert str(SCRIPT) in text
    assert "accelerator of rank 0: 100 % busy, memory 0 %: like a collective that waits" in text
    kept = json.loads((launch.job_dir / "evidence/1.json").read_text())
    sources = {worker["source"] for worker in kept["evidence"]}
    assert sources == ({by} if by == "faulthandler" or _may_look() else {"faulthandler"})
    assert len(launch.events_of(events.RestartDecided)) == 1
    assert len(launch.events_of(events.Recovered)) == 1


def _may_look() -> bool:
    """Whether py-spy is here and lets one look into another process."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    here = any((Path(p) / "py-spy").exists() for p in os.environ["PATH"].split(os.pathsep))
    return here and (os.geteuid() == 0 or not scope.exists() or scope.read_text().strip() == "0")


@pytest.mark.long
def test_a_hang_that_is_only_to_be_reported_goes_on_and_can_be_looked_at(run, training) -> None:
    launch = training("sleep", "--nproc-per-node=2", conf=f"{QUICK},hang_action=report")
    launch.until(lambda: launch.events_of(events.HangFound), 60, "the report")
    status = run.status(launch)
    assert status["status"]["restarts"] == 0
    assert re.fullmatch(r"(data|step) \d+ s", status["status"]["nodes"][0]["doing"])
    stacks = run.dlrover("stacks", "--job-dir", launch.job_dir)
    assert f"in Samples.__getitem__ (hangs.py:{line_of('time.sleep(1000)')})" in stacks.stdout or (
        f"in __getitem__ (hangs.py:{line_of('time.sleep(1000)')})" in stacks.stdout
    )
    as_json = json.loads(
        run.dlrover("stacks", "--job-dir", launch.job_dir, "--output", "json").stdout
    )
    assert {tuple(group["ranks"]) for group in as_json["groups"]} == {(0,), (1,)}
    assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
    launch.wait()
    assert len(launch.events_of(events.HangFound)) == 1
    assert not launch.events_of(events.RestartDecided)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        "long start",
        "long checkpoint",
        pytest.param("long compile", marks=pytest.mark.heavy),
        pytest.param("long evaluation", marks=pytest.mark.heavy),
    ],
)
def test_what_takes_long_is_no_hang(training, fault: str) -> None:
    launch = training(fault, "--nproc-per-node=2")
    launch.succeed(100)
    assert not launch.events_of(events.HangFound)
    assert not launch.events_of(events.RestartDecided)


@pytest.mark.long
def test_a_job_that_is_stopped_and_continued_is_no_hang(training) -> None:
    launch = training("slow data", "--nproc-per-node=2")
    out = launch.job_dir.parent.parent / "out" / "done"
    launch.until(lambda: out.exists() and int(out.read_text() or 0) > 20, 60, "twenty steps")
    processes = launch.processes()
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    for process in processes:
        process.send_signal(signal.SIGCONT)
    before = int(out.read_text())
    launch.until(lambda: int(out.read_text() or 0) > before + 60, 60, "sixty more steps")
    assert not launch.events_of(events.HangFound)
    assert not launch.events_of(events.RestartDecided)


@pytest.mark.long
@pytest.mark.parametrize(("fault", "cause"), [("slow rank", "compute"), ("slow data", "data")])
def test_a_slow_rank_is_named(run, training, fault: str, cause: str) -> None:
    conf = f"{QUICK},slow_rank_window=2,slow_rank_windows=2"
    launch = training(fault, "--local-nodes=3", conf=conf)
    launch.until(lambda: launch.events_of(events.SlowRank), 60, "the slow rank")
    (found,) = (event.body for event in launch.events_of(events.SlowRank))
    assert (found.rank, found.cause) == (2, cause)
    assert found.node == next(
        node["id"] for node in run.status(launch)["status"]["nodes"] if node["node_rank"] == 2
    )
    assert 1.2 <= found.factor < 4.0
    assert found.sentence() in launch.stderr
    (slow,) = run.status(launch)["status"]["slow"]
    assert slow.startswith(found.sentence().partition(", and takes")[0])


def test_a_command_that_is_no_python_gets_no_signal(run) -> None:
    seen = run.directory / "seen"
    launch = run(
        "--no-python",
        "--rdzv-conf",
        QUICK + ",hang_start_limit=1",
        "bash",
        "-c",
        f"until [ -e {seen} ]; do sleep 0.1; done; echo ok",
    )
    launch.wait_for("worker")
    time.sleep(1.5)
    looked = run.dlrover("stacks", "--job-dir", launch.job_dir)
    seen.touch()
    assert "1 of 1 ranks (0) without a stack" in looked.stdout
    assert "ok" in launch.succeed()
    assert not launch.events_of(events.HangFound)
