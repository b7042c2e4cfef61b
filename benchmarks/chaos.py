"""Every fault of ``dlrover chaos`` on four local nodes: detection, recovery, steps lost; beside torchrun.

The program is ``chaos_worker.py``: each step is saved to memory, each 40th to storage. torchrun has four
agents on a c10d rendezvous and a fifth process, this one, that starts an agent again when it was killed; it
gets the faults from which it can recover at all.

    python benchmarks/chaos.py --json benchmarks/results/chaos.json
    python benchmarks/chaos.py --faults kill-rank --nodes 2        # a smoke test
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from dlrover.testing.chaos.verbs import VERBS
from dlrover.training.worker.bootstrap import recorded_step

WORKER = Path(__file__).with_name("chaos_worker.py")
CHAOS = [sys.executable, "-m", "dlrover.cli.main", "chaos"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
DISK = "128m"
"""Size of the file system that is filled."""
NEED_ROOT = "fill-disk"
START_LIMIT = 120.0
"""Seconds until a job makes its first steps."""
STEPS_BEFORE = 20
"""Steps that torchrun's job makes before it is struck."""
PORT = 29471


@contextlib.contextmanager
def small_disk(directory: Path, wanted: bool) -> Any:
    """A directory on a file system of its own, if that is wanted."""
    directory.mkdir()
    if wanted:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(directory)]
        subprocess.run(mount, check=True)
    try:
        yield
    finally:
        if wanted:
            subprocess.run(["umount", str(directory)], check=True)


def ours(folder: Path, faults: list[str], nodes: int) -> dict[str, Any]:
    """The report of ``dlrover chaos``, each fault in one job."""
    checkpoints, out = folder / "checkpoints", folder / "out"
    out.mkdir()
    options = ["--nodes", nodes, "--faults", ",".join(faults), "--seed", 1, "--stop", "-o", "json"]
    options += ["--no-networks"]  # torchrun's nodes have none of their own either
    options += ["--checkpoint-dir", checkpoints, "--steps-file", out / "steps.jsonl"]
    program = [WORKER, "--out", out, "--checkpoints", checkpoints]
    with small_disk(checkpoints, NEED_ROOT in faults):
        done = subprocess.run(
            [str(word) for word in (*CHAOS, *options, "--job-dir", folder / "job", *program)],
            stdout=subprocess.PIPE,
            check=False,
        )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


class Torchrun:
    """Four agents of torchrun, each in a process group of its own."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder = folder
        self._nodes = nodes
        self._log = (folder / "torchrun.txt").open("wb")
        self._steps = folder / "out" / "steps.jsonl"
        (folder / "out").mkdir()
        self.agents = [self._start() for _ in range(nodes)]

    def step(self) -> int:
        """The last step that the program has recorded."""
        return recorded_step(self._steps)

    def _start(self) -> psutil.Popen:
        options = ["--nnodes", self._nodes, "--nproc-per-node", 1, "--max-restarts", 20]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{PORT}"]
        options += ["--rdzv-id", "chaos", "--monitor-interval", 0.1]
        program = [WORKER, "--out", self._folder / "out", "--checkpoints", self._folder / "ck"]
        return psutil.Popen(
            [str(word) for word in (*TORCHRUN, *options, *program)],
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def worker(self, agent: int) -> psutil.Process:
        """The training process of an agent."""
        return next(p for p in self.agents[agent].children() if str(WORKER) in p.cmdline())

    def strike(self, fault: str) -> None:
        """Kill the worker of the last agent, or that agent too, which is then started again."""
        last = self._nodes - 1
        worker = self.worker(last)
        if fault == "kill-node":
            self.agents[last].kill()
            self.agents[last].wait()
        worker.kill()
        if fault == "kill-node":
            self.agents[last] = self._start()

    def close(self) -> None:
        """End all of it."""
        family = [p for agent in self.agents for p in _family(agent)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in self.agents:
            agent.wait()
        self._log.close()


def _family(agent: psutil.Popen) -> list[psutil.Process]:
    try:
        return [agent, *agent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def theirs(folder: Path, fault: str, nodes: int, limit: float) -> dict[str, Any]:
    """What becomes of one fault under torchrun: seconds until the next step, and steps done again."""
    job = Torchrun(folder, nodes)
    try:
        until = time.monotonic() + START_LIMIT
        while job.step() < STEPS_BEFORE:
            if time.monotonic() > until:
                raise SystemExit(
                    f"torchrun did not start:\n{(folder / 'torchrun.txt').read_text()}"
                )
            time.sleep(0.05)
        starts = begun(folder)
        numbers = [job.step()]
        struck = time.time()
        job.strike(fault)
        while time.time() - struck < limit:
            numbers.append(job.step())
            if begun(folder) > starts and numbers[-1] > numbers[-2]:
                return {
                    "fault": fault,
                    "training_again": time.time() - struck,
                    "steps_lost": max(numbers) - min(numbers[numbers.index(max(numbers)) :]),
                }
            time.sleep(0.02)
        return {"fault": fault, "training_again": None, "steps_lost": None}
    finally:
        job.close()


def begun(folder: Path) -> int:
    """How often rank 0 has begun to train."""
    path = folder / "out" / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def show(report: dict[str, Any], torchrun: dict[str, dict[str, Any]]) -> None:
    """Print both as one table."""
    print(f"{'fault':20}{'detected':>10}{'again':>10}{'lost':>6}{'torchrun':>12}{'lost':>6}")
    for row in report["faults"]:
        beside = torchrun.get(row["fault"])
        mine = f"{seconds(row['detected']):>10}{seconds(row['training_again']):>10}"
        other = f"{'-':>12}{'-':>6}"
        if beside is not None:
            again = seconds(beside["training_again"], "no")
            other = f"{again:>12}{number(beside['steps_lost']):>6}"
        print(f"{row['fault']:20}{mine}{number(row['steps_lost']):>6}{other}")
        print(f"    {row['verdict']}")


def seconds(value: float | None, missing: str = "-") -> str:
    """A time; 0 is a fault that training did not stop for."""
    return missing if value is None else f"{value:.2f} s"


def number(value: int | None) -> str:
    """A number that may not be known."""
    return "-" if value is None else str(value)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--faults", default=",".join(VERBS), help="all of them by default")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that torchrun gets")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    faults = args.faults.split(",")
    if os.geteuid() and NEED_ROOT in faults:
        faults.remove(NEED_ROOT)
        print(f"{NEED_ROOT} is left out: only root can mount a small file system.")
    torchrun = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ours").mkdir()
        report = ours(folder / "ours", faults, args.nodes)
        for fault in [fault for fault in ("kill-rank", "kill-node") if fault in faults]:
            (folder / fault).mkdir()
            torchrun[fault] = theirs(folder / fault, fault, args.nodes, args.limit)
    show(report, torchrun)
    if args.json:
        machine = {
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "python": platform.python_version(),
            "kernel": platform.release(),
        }
        kept = {"machine": machine, "dlrover": report, "torchrun": torchrun}
        args.json.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
