"""The size that a job with parameter servers finds by itself, beside the best of all sizes, with real processes.

Every size from one worker and one server on is measured in a job of its own; then a job finds its size with
``--auto-scale`` from the smallest one, with no other setting, and its last size is compared by what was measured
of all. The program is the example ``05_parameter_server``, whose workers and servers idle for a fixed time, so that
processors are no limit. A size is worth its steps per second over the square root of its nodes.

    python benchmarks/parameter_server.py                       # the figures in benchmarks/README.md
    python benchmarks/parameter_server.py --workers 2 --servers 1 --seconds 5
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "05_parameter_server" / "train.py"
BATCH = 100
LAWS = {
    "servers are busy": {"step-time": 0.02, "row-time": 0.00006},
    "servers idle": {"step-time": 0.1, "row-time": 0.000005},
}
"""What workers and servers idle: seconds of a step, and of a row."""
LIMIT = 120.0
"""Seconds in which a job of one size is to be measured."""
PROGRESS = re.compile(r"step \d+: (\d+) clicks")
Size = tuple[int, int]


class Job:
    """One job of the example."""

    def __init__(self, directory: Path, out: Path, law: dict[str, float], *options: str) -> None:
        self.directory = directory
        directory.mkdir()
        program = [str(EXAMPLE), "--out", str(out), "--clicks=4000000"]
        program += ["--save-every=20", *(f"--{name}={value}" for name, value in law.items())]
        command = [
            sys.executable,
            "-u",
            "-m",
            "dlrover.cli.run.run",
            "--job-dir",
            str(directory / "job"),
        ]
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options, *program],
                env={**os.environ, "DLROVER_STATE_DIR": str(directory), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
            )

    def progress(self, limit: float) -> Iterator[tuple[float, int]]:
        """The time of each line about the progress, and the samples that were learned from by then."""
        assert self.process.stdout is not None
        until = time.monotonic() + limit
        for line in self.process.stdout:
            now = time.monotonic()
            found = PROGRESS.search(line)
            if found:
                yield now, int(found[1])
            if now > until:
                return

    def told(self, kind: str) -> list[dict]:
        """The events of a kind so far."""
        path = self.directory / "job" / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        bodies = [json.loads(line)["body"] for line in lines]
        return [body for body in bodies if body["type"] == kind]

    def end(self) -> None:
        """Stop it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def rate(folder: Path, law: dict[str, float], size: Size, seconds: float) -> float:
    """Worker steps per second of a size, between two saves about ``seconds`` apart.

    The table is divided by the load from the second world on; a first one, whose saves are stored when it is
    stopped, sees to that. It is stopped at its second save, since the last one need not be complete.
    """
    workers, servers = size
    options = (f"--nnodes={workers}", f"--local-nodes={workers}", f"--servers={servers}")
    name = f"{workers}-{servers}"
    first = Job(folder / f"{name}-first", folder / name, law, *options, "--save-at-breakpoint")
    try:
        lines = first.progress(LIMIT)
        _, stored = next(lines)
        next(lines)
    finally:
        first.end()
    job = Job(folder / f"{name}-second", folder / name, law, *options)
    try:
        lines = job.progress(LIMIT)
        _, learned = next(lines)
        if learned < 1.5 * stored:
            raise SystemExit(f"{size} began anew: {(job.directory / 'log').read_text()}")
        began, learned = next(lines)
        for now, then in lines:
            if now - began >= seconds:
                return (then - learned) / BATCH / (now - began)
    finally:
        job.end()
    raise SystemExit(f"{size} made no progress: {(job.directory / 'log').read_text()}")


def found_by_itself(folder: Path, law: dict[str, float], most: Size) -> tuple[dict, list[dict]]:
    """The size that a job settles at, and its plans."""
    options = ("--local-nodes=1", f"--nnodes=1:{most[0]}", f"--servers=1:{most[1]}", "--auto-scale")
    job = Job(
        folder / "auto",
        folder / "auto-out",
        law,
        *options,
        "--rdzv-conf=autoscale_window=5,heartbeat_interval=1",
    )
    try:
        until = time.monotonic() + 600
        while not (settled := job.told("size_settled")):
            if time.monotonic() > until or job.process.poll() is not None:
                raise SystemExit(f"it did not settle: {(job.directory / 'log').read_text()}")
            time.sleep(1.0)
        return settled[0], job.told("plan_measured")
    finally:
        job.end()


def main() -> None:
    """Measure, print the tables, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4, help="at most")
    parser.add_argument("--servers", type=int, default=3, help="at most")
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring a size")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    sizes = list(itertools.product(range(1, args.workers + 1), range(1, args.servers + 1)))
    report: dict[str, dict] = {}
    for name, law in LAWS.items():
        with tempfile.TemporaryDirectory() as folder:
            worth = {}
            for size in sizes:
                steps = rate(Path(folder), law, size, args.seconds)
                worth[size] = steps / sum(size) ** 0.5
                print(
                    f"{name}, {size[0]} workers, {size[1]} servers: {steps:.1f} steps/s", flush=True
                )
            settled, plans = found_by_itself(Path(folder), law, (args.workers, args.servers))
        best = max(worth, key=worth.__getitem__)
        found = (settled["nodes"], settled["servers"])
        ratio = worth[found] / worth[best]
        print(
            f"{name}: best {best}, found {found} after {len(plans)} changes, worth {ratio:.2f} of it"
        )
        report[name] = {
            "worth": {f"{w} workers, {p} servers": value for (w, p), value in worth.items()},
            "best": best,
            "found": found,
            "changes": len(plans),
            "ratio": ratio,
        }
    if args.json:
        machine = {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "kernel": platform.release(),
        }
        args.json.write_text(json.dumps({"machine": machine, "figures": report}, indent=2) + "\n")


if __name__ == "__main__":
    main()
