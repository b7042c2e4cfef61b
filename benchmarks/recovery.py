"""Recovery: from SIGKILL of one of two workers to the first step after it, beside torchrun.

Every launcher runs the same program (``recovery_worker.py``), in turn, so that a machine whose speed
drifts slows all of them. A kill that does not lead to a step within the limit counts as not recovered; a
kill that takes more than one restart as such.

    python benchmarks/recovery.py                   # the figures in benchmarks/README.md
    python benchmarks/recovery.py --kills 1 --streak 0
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKER = Path(__file__).with_name("recovery_worker.py")
STEPS_BEFORE_KILL = 40
START_LIMIT = 60.0
"""Seconds until a (re)started job has made that many steps."""
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1",
    "--max-restarts", "20",
]  # fmt: skip
LAUNCHERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "dlrover-run": ([sys.executable, "-m", "dlrover.cli.run.run"], {}),
    "torchrun": (TORCHRUN, {}),
    "torchrun, store not shared": (TORCHRUN, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
}


class Job:
    """One launcher running the worker program."""

    def __init__(self, launcher: str, directory: Path) -> None:
        command, env = LAUNCHERS[launcher]
        self.directory = directory
        directory.mkdir()
        state = {"DLROVER_STATE_DIR": str(directory / "state")}
        with (directory / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--nproc-per-node", "2", str(WORKER), str(directory), "1000000"],
                env={**os.environ, **state, **env},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def entries(self) -> list[dict[str, float]]:
        """What rank 0 has written so far."""
        path = self.directory / "steps.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for_step(self, restart: int, steps: int, limit: float) -> dict[str, float] | None:
        """The first entry with at least ``restart`` once so many of them exist; None if too late."""
        until = time.monotonic() + limit
        while time.monotonic() < until and self.process.poll() is None:
            found = [entry for entry in self.entries() if entry["restart"] >= restart]
            if len(found) >= steps:
                return found[0]
            time.sleep(0.01)
        return None

    def kill_rank(self, rank: int) -> float:
        """Kill a worker; when."""
        pid = int((self.directory / f"pid-{rank}").read_text())
        now = time.time()
        os.kill(pid, signal.SIGKILL)
        return now

    def end(self) -> None:
        """Let the program finish; kill the launcher's process group if it does not."""
        (self.directory / "stop").touch()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        shutil.rmtree(self.directory)


def measure(launcher: str, directory: Path, kills: int, limit: float) -> list[dict[str, float]]:
    """Kill rank 1 so often, one after the other; what became of each kill."""
    job = Job(launcher, directory)
    results = []
    try:
        restart = 0
        if job.wait_for_step(restart, STEPS_BEFORE_KILL, START_LIMIT) is None:
            raise SystemExit(f"{launcher} did not start:\n{(directory / 'output').read_text()}")
        for _ in range(kills):
            killed = job.kill_rank(1)
            entry = job.wait_for_step(restart + 1, 1, limit)
            if entry is None:
                results.append({"seconds": limit, "recovered": False, "restarts": 0})
                break
            results.append(
                {
                    "seconds": entry["time"] - killed,
                    "recovered": True,
                    "restarts": entry["restart"] - restart,
                }
            )
            restart = int(entry["restart"])
            if job.wait_for_step(restart, STEPS_BEFORE_KILL, START_LIMIT) is None:
                break
    finally:
        job.end()
    return results


def summary(results: list[dict[str, float]]) -> dict[str, float]:
    """The figures of one launcher."""
    seconds = [r["seconds"] for r in results if r["recovered"]]
    return {
        "kills": len(results),
        "recovered": len(seconds),
        "in_one_restart": sum(r["recovered"] and r["restarts"] == 1 for r in results),
        "median_seconds": statistics.median(seconds) if seconds else float("nan"),
        "min_seconds": min(seconds, default=float("nan")),
        "max_seconds": max(seconds, default=float("nan")),
    }


def main() -> None:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="kills of each launcher")
    parser.add_argument(
        "--streak", type=int, default=20, help="further kills of dlrover-run, in a row"
    )
    parser.add_argument(
        "--limit", type=float, default=25.0, help="seconds until a kill is given up"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in LAUNCHERS}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for kill in range(args.kills):
            for name in LAUNCHERS:
                results[name] += measure(name, Path(folder) / f"job-{kill}", 1, args.limit)
                print(f"{name}: {results[name][-1]}", flush=True)
        streak = []
        if args.streak:
            streak = measure("dlrover-run", Path(folder) / "streak", args.streak, args.limit)
    figures = {name: summary(found) for name, found in results.items()}
    figures["dlrover-run, one job"] = summary(streak)
    ours = figures["dlrover-run"]["median_seconds"]
    theirs = figures["torchrun, store not shared"]["median_seconds"]
    for name, found in figures.items():
        print(
            f"{name:28} {found['median_seconds']:6.2f} s [{found['min_seconds']:.2f} to "
            f"{found['max_seconds']:.2f}], {found['recovered']} of {found['kills']} recovered, "
            f"{found['in_one_restart']} in one restart"
        )
    print(f"dlrover-run / torchrun (store not shared): {ours / theirs:.3f}")
    if args.json:
        machine = {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "kernel": platform.release(),
        }
        report = {"machine": machine, "figures": figures, "ratio": ours / theirs}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
