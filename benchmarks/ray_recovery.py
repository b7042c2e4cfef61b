"""Recovery on Ray: from SIGKILL of a worker, an actor or a raylet to the next step, beside Ray Train v2 with ``FailureConfig``.

A head and three nodes with one CPU each run on this machine; the jobs, one after the other, have two workers.

    python benchmarks/ray_recovery.py --json benchmarks/results/ray_recovery.json    # needs ray[train]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.ray.conftest import Cluster

HERE = Path(__file__).resolve().parent
WORKER = HERE / "ray_recovery_worker.py"
STEPS_BEFORE = 20
START = 180.0
"""Seconds for a job to start, or to go on after a kill."""
OURS, THEIRS = "dlrover-run --platform ray", "Ray Train v2"
VICTIMS = {OURS: ("worker", "actor", "raylet"), THEIRS: ("actor", "raylet")}
"""The workers of Ray Train are actors."""
LIMITS = "--rdzv-conf=max_infrastructure_restarts=100,no_progress_restarts=100"


class Job:
    """A training with two workers on the cluster."""

    def __init__(self, cluster: Cluster, launcher: str, folder: Path) -> None:
        self._cluster, self._out = cluster, folder
        folder.mkdir()
        command = [sys.executable, __file__, "--fit", cluster.address, folder]
        if launcher == OURS:
            options = [*cluster.options(2, max_restarts=0, shutdown_timeout=5), LIMITS]
            command = [sys.executable, "-m", "dlrover.cli.run.run", *options, WORKER, folder]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *map(str, command)],
                env=cluster.env,
                stdout=log,
                stderr=log,
            )
        self.wait(0.0, 0, STEPS_BEFORE)

    def _steps(self) -> list[dict[str, float]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self._out / "steps.jsonl").read_text().split("\n")[:-1]
            return [json.loads(line) for line in lines]
        return []

    def wait(self, after: float, not_by: int, count: int) -> float:
        """Wait for steps after a time by another process than one; return the time of the first."""
        late = time.monotonic() + START
        while time.monotonic() < late and self._process.poll() is None:
            found = [one for one in self._steps() if one["time"] > after and one["pid"] != not_by]
            if len(found) >= count:
                return found[0]["time"]
            time.sleep(0.02)
        raise SystemExit(f"There was no step in time:\n{(self._out / 'log').read_text()[-4000:]}")

    def kill(self, what: str) -> float:
        """Kill the second worker or what is above it; return the seconds to the next step."""
        first, second = (int((self._out / f"pid-{rank}").read_text()) for rank in (0, 1))
        above = [psutil.Process(second), *psutil.Process(second).parents()]
        raylet = next(place for place, one in enumerate(above) if one.name() == "raylet")
        victim = above[{"worker": 0, "actor": raylet - 1, "raylet": raylet}[what]]
        killed = time.time()
        victim.kill()
        self.wait(killed, first, STEPS_BEFORE)
        again = self.wait(killed, first, 1) - killed
        if what == "raylet":
            self._cluster.add_nodes(1)
        return again

    def end(self) -> None:
        """Let the program end; end the process that waits for it if it does not."""
        (self._out / "stop").touch()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def fit(address: str, out: str) -> None:
    """Train with Ray Train, whatever fails."""
    import ray  # noqa: PLC0415 - reads the environment
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: PLC0415
    from ray.train.torch import TorchTrainer  # noqa: PLC0415
    from ray_recovery_worker import loop  # noqa: PLC0415

    ray.init(address)
    again = RunConfig(storage_path=out, failure_config=FailureConfig(max_failures=-1))
    scaling = ScalingConfig(num_workers=2)
    TorchTrainer(
        loop, train_loop_config={"out": out}, scaling_config=scaling, run_config=again
    ).fit()


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=3, help="of each kind")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--fit", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    if args.fit:
        fit(*args.fit)
        return
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    os.environ |= {**token, "PYTHONPATH": f"{HERE}:{HERE.parent / 'src'}"}
    figures: dict[str, Any] = {}
    cluster = Cluster(3)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, (launcher, victims) in enumerate(VICTIMS.items()):
                job = Job(cluster, launcher, Path(folder) / str(number))
                for what in victims:
                    seconds = [job.kill(what) for _ in range(args.kills)]
                    figures[f"{launcher}: {what}"] = seconds
                    print(
                        f"{launcher}: {what}: {statistics.median(seconds):.1f} s {seconds}",
                        flush=True,
                    )
                job.end()
    finally:
        cluster.close()
    if args.json:
        machine = {
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "python": platform.python_version(),
        }
        args.json.write_text(json.dumps({"machine": machine, "seconds": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
