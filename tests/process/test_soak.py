"""A random fault every 8 s: the job ends as an undisturbed one does, and nothing grows or stays.

The same for 30 minutes is in ``benchmarks/README.md``.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from dlrover.testing.chaos.targets import Targets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.long,
    pytest.mark.heavy,
    pytest.mark.timeout(420),
]

CHAR_GPT = Path(__file__).parents[2] / "examples" / "02_char_gpt" / "train.py"
TINY = (
    *("--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--corpus-mb", "1"),
    *("--global-batch-size", "12", "--lr", "0.01", "--steps", "200", "--eval-every", "100"),
    *("--sample", "20", "--save-every", "4"),
)
NODES = 2
SEED = 2
"""One whose plan has each kind of fault at least twice."""
EVERY = 8
SECONDS = 48
STEP_TIME = 0.25
"""Seconds that a step idles: the job lasts longer than the faults come."""
ENV = {"OMP_NUM_THREADS": "1"}
CACHE = f"torchinductor_{getpass.getuser()}"
"""The directory for compiled code that PyTorch keeps for each user."""
MEMORY_GROWTH = 32 << 20
"""Bytes by which a master or an agent may grow while the job runs."""
FILES_GROWTH = 20
"""Open files and sockets by which it may grow; ports are sockets."""


class Growth:
    """How a job's master and agents grow between their first seconds and their last moment."""

    def __init__(self, job_dir: Path) -> None:
        self._targets = Targets(job_dir)
        self._seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(1.0):
            master = self._targets.master()
            agents = [node.agent for node in self._targets.nodes()]
            for process in [*agents, *([master] if master else [])]:
                with contextlib.suppress(psutil.Error):
                    now = process.memory_info().rss, process.num_fds()
                    self._seen[process.pid].append(now)

    def close(self) -> tuple[int, int]:
        """The most by which one of them grew: bytes of memory, and open files with sockets."""
        self._end.set()
        self._thread.join(10)
        grown = [(sizes[min(3, len(sizes) - 1)], sizes[-1]) for sizes in self._seen.values()]
        assert grown, "no process was seen"
        memory = max(last[0] - first[0] for first, last in grown)
        return memory, max(last[1] - first[1] for first, last in grown)


def shared_memory() -> set[str]:
    """The files in /dev/shm that no process has mapped."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text(errors="replace")
    return {str(path) for path in Path("/dev/shm").iterdir() if str(path) not in mapped}


def losses(out: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


def test_random_faults_change_nothing_and_leave_nothing(run) -> None:
    undisturbed = run.directory / "undisturbed"
    run(
        "--local-nodes", NODES, CHAR_GPT, "--out", undisturbed, *TINY, name="calm", env=ENV
    ).succeed(180)

    out, job_dir = run.directory / "out", run.directory / "job"
    temporary, shared = run.directory / "tmp", shared_memory()
    temporary.mkdir()
    env = {**run.env, **ENV, "TMPDIR": str(temporary)}
    faults = "kill-rank,kill-node,kill-master"
    options = ["--nodes", NODES, "--job-dir", job_dir, "--steps-file", out / "losses.jsonl"]
    options += ["--faults", faults, "--every", EVERY, "--for", SECONDS]
    options += ["--seed", SEED, "--output", "json"]
    program = [CHAR_GPT, "--out", out, *TINY, "--step-time", STEP_TIME]
    command = [sys.executable, "-m", "dlrover.cli.main", "chaos", *options, *program]
    watch = Growth(job_dir)
    ended = subprocess.run(
        [str(word) for word in command],
        env=env,
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    memory, files = watch.close()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert len(report["faults"]) == SECONDS // EVERY, report["not_injected"]
    assert {row["fault"] for row in report["faults"]} == set(faults.split(","))
    assert all(row["training_again"] is not None for row in report["faults"])
    assert losses(out) == losses(undisturbed)
    assert report["left_behind"] == []
    assert {path.name for path in temporary.iterdir()} <= {CACHE}
    assert shared_memory() <= shared
    assert memory < MEMORY_GROWTH
    assert files < FILES_GROWTH
