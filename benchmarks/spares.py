"""Loss of a node, from SIGKILL of all its processes to the first step after it, with and without a spare.

Both jobs run the same program (``recovery_worker.py``) on two local nodes, in turn, so that a machine whose speed
drifts slows both. The next kill waits until the job has all its nodes again, and its spare.

    python benchmarks/spares.py                    # the figures in benchmarks/README.md
    python benchmarks/spares.py --kills 1

With ``--launch SECONDS`` a node takes that much longer to start, as a pod does whose image must be pulled; a
local node starts at once. Spares start equally late, but nobody waits for them.
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
from collections.abc import Callable
from pathlib import Path

WORKER = Path(__file__).with_name("recovery_worker.py")
STEPS_BEFORE_KILL = 20
LIMIT = 180.0
"""Seconds allowed for each wait."""
NODES = 2
RUN = [sys.executable, "-m", "dlrover.cli.run.run", f"--local-nodes={NODES}"]
JOBS = {"without a spare": [], "with a spare": ["--spares=1"]}


class Job:
    """One job of local nodes."""

    def __init__(self, options: list[str], directory: Path, launch: float) -> None:
        self.directory = directory
        self.spares = len(options)
        directory.mkdir()
        env = {**os.environ, "DLROVER_STATE_DIR": str(directory / "state")}
        if launch:
            env["DLROVER_NODE_COMMAND"] = f"sh -c 'sleep {launch}; exec \"$@\"' sh"
        command = [*RUN, *options, "--job-dir", str(directory / "job")]
        with (directory / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, str(WORKER), str(directory), "1000000"],
                env=env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _lines(self, path: Path) -> list[dict]:
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def steps(self, restart: int) -> list[dict]:
        """Steps of a restart and of later ones."""
        return [e for e in self._lines(self.directory / "steps.jsonl") if e["restart"] >= restart]

    def events(self, kind: str) -> list[dict]:
        """Events of a kind."""
        found = (event["body"] for event in self._lines(self.directory / "job" / "events.jsonl"))
        return [body for body in found if body["type"] == kind]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition."""
        until = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > until or self.process.poll() is not None:
                raise SystemExit(f"no {what}:\n{(self.directory / 'output').read_text()[-4000:]}")
            time.sleep(0.01)

    def ready(self, restart: int) -> None:
        """Wait until a node may be lost."""
        self.wait(lambda: len(self.steps(restart)) >= STEPS_BEFORE_KILL, "steps")
        wanted = self.spares * (restart + 1)
        self.wait(lambda: len(self.events("spare_ready")) >= wanted, "spare")
        time.sleep(2.0 * bool(self.spares))  # until it has loaded the program's modules

    def kill_node(self) -> float:
        """Kill the processes of the node of rank 1; when."""
        worker = int((self.directory / "pid-1").read_text())
        zygote = _parent(worker)
        agent = _parent(zygote)
        now = time.time()
        for pid in (agent, zygote, worker):
            os.kill(pid, signal.SIGKILL)
        return now

    def end(self) -> None:
        """Let the program finish."""
        (self.directory / "stop").touch()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()
        shutil.rmtree(self.directory)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def measure(options: list[str], directory: Path, kills: int, launch: float) -> list[float]:
    """Lose a node so often; seconds to the next step of each."""
    job = Job(options, directory, launch)
    seconds = []
    try:
        for kill in range(kills):
            job.ready(kill)
            at = job.kill_node()
            job.wait(lambda number=kill + 1: job.steps(number), "step after the loss")
            seconds.append(job.steps(kill + 1)[0]["time"] - at)
    finally:
        job.end()
    return seconds


def main() -> None:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=3, help="jobs of each kind")
    parser.add_argument("--kills", type=int, default=3, help="kills of each job")
    parser.add_argument("--launch", type=float, default=0.0, help="seconds to start a node")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    results: dict[str, list[float]] = {name: [] for name in JOBS}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for number in range(args.jobs):
            for name, options in JOBS.items():
                directory = Path(folder) / f"job-{number}"
                results[name] += measure(options, directory, args.kills, args.launch)
                print(f"{name}: {results[name][-args.kills :]}", flush=True)
    figures = {}
    for name, found in results.items():
        middle = statistics.median(found)
        figures[name] = {"seconds": found, "median": middle, "worst": max(found)}
        print(
            f"{name:16} {middle:6.2f} s [{min(found):.2f} to {max(found):.2f}], {len(found)} kills"
        )
    ratio = figures["without a spare"]["median"] / figures["with a spare"]["median"]
    print(f"without / with: {ratio:.1f}")
    if args.json:
        machine = {
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "python": platform.python_version(),
            "kernel": platform.release(),
        }
        report = {"machine": machine, "launch": args.launch, "figures": figures, "ratio": ratio}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
