"""Recovery on Ray: from a SIGKILL to the next step, of ``dlrover-run --platform ray`` and of Ray Train v2.

Both run the program of ``recovery_worker.py`` with two workers on a running cluster whose nodes are all on this machine, each
with one CPU; after a killed raylet, start another node for the next one.

    RAY_ADDRESS=10.0.0.5:6379 python benchmarks/ray.py --json results/ray.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

WORKER = Path(__file__).with_name("recovery_worker.py")
LIMIT = 300.0
"""Seconds until a kill counts as not recovered."""
STEPS_BEFORE_KILL = 20
TRAIN = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, TorchConfig

def work(config):
    sys.path.insert(0, config["here"])
    import recovery_worker
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    dist.init_process_group = lambda *_: None  # Ray Train has made it
    recovery_worker.main(Path(config["out"]), 1_000_000)

TorchTrainer(
    work,
    train_loop_config={"here": sys.argv[1], "out": sys.argv[2]},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    run_config=RunConfig(storage_path=sys.argv[2] + "/ray", failure_config=FailureConfig(max_failures=-1)),
).fit()
"""


def command(launcher: str, out: Path, address: str) -> list[str]:
    """Return the command that runs the program with a launcher."""
    if launcher == "Ray Train v2":
        return [sys.executable, "-c", TRAIN, str(WORKER.parent), str(out)]
    run = [
        sys.executable,
        "-m",
        "dlrover.cli.run.run",
        "--platform",
        "ray",
        "--ray-address",
        address,
    ]
    return [*run, "--nnodes", "2", "--job-dir", str(out / "job"), str(WORKER), str(out), "1000000"]


class Job:
    """One launcher that runs the program."""

    def __init__(self, launcher: str, out: Path, address: str) -> None:
        self.out = out
        env = {**os.environ, "RAY_ADDRESS": address, "RAY_TRAIN_V2_ENABLED": "1"}
        with (out / "output").open("wb") as output:
            self.process = subprocess.Popen(
                command(launcher, out, address), env=env, stdout=output, stderr=output
            )

    def steps_since(self, moment: float) -> list[float]:
        """Return the times of the steps after ``moment``."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.out / "steps.jsonl").read_text().split("\n")[:-1]
            return [t for t in (json.loads(line)["time"] for line in lines) if t > moment]
        return []

    def victim(self, kind: str) -> psutil.Process:
        """Return a process of the job that is to be killed."""
        worker = psutil.Process(int((self.out / "pid-1").read_text()))
        if kind == "worker":
            return worker
        chain = [worker, *worker.parents()]
        raylet = next(i for i, one in enumerate(chain) if one.name() == "raylet")
        return chain[raylet if kind == "raylet" else raylet - 1]

    def recover(self, kind: str) -> float | None:
        """Kill a process; return the seconds until the next step of the next round."""
        wait(lambda: len(self.steps_since(0.0)) >= STEPS_BEFORE_KILL)
        pid = self.out / "pid-0"
        before, killed = pid.stat().st_mtime, time.time()
        self.victim(kind).kill()
        if not wait(lambda: pid.stat().st_mtime > before and self.steps_since(pid.stat().st_mtime)):
            return None
        first = self.steps_since(pid.stat().st_mtime)[0]
        wait(lambda: len(self.steps_since(first)) >= STEPS_BEFORE_KILL)
        return first - killed

    def stop(self) -> None:
        """End the program in order."""
        (self.out / "stop").touch()
        try:
            self.process.wait(120)
        finally:
            self.process.kill()


def wait(condition: Callable[[], object]) -> bool:
    """Wait for a condition; return whether it came true in time."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--kinds", default="worker,actor", help="worker, actor, raylet")
    parser.add_argument("--launchers", default="dlrover-run,Ray Train v2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, list[float | None]]] = {}
    for launcher in args.launchers.split(","):
        out = Path(tempfile.mkdtemp(prefix="ray-benchmark"))
        job = Job(launcher, out, os.environ["RAY_ADDRESS"])
        found = results[launcher] = {}
        try:
            for kind in args.kinds.split(","):
                if kind == "actor" and launcher == "Ray Train v2":
                    continue  # its worker is the actor
                found[kind] = [job.recover(kind) for _ in range(args.kills)]
                known = [seconds for seconds in found[kind] if seconds is not None]
                middle = f"{statistics.median(known):.2f} s" if known else "never"
                print(f"{launcher}, {kind}: {middle} {found[kind]}", flush=True)
        finally:
            job.stop()
            shutil.rmtree(out, ignore_errors=True)
    if args.json:
        load = os.getloadavg()
        args.json.write_text(json.dumps({"seconds": results, "load": load}, indent=2) + "\n")


if __name__ == "__main__":
    main()
