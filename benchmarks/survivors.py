"""Survivors: what the loss of a replica costs the others, beside a restart and beside torchft.

One job per kind and number of replicas gets several faults, one after the other, each at a random instant and in a random
replica, once all replicas train again. The survivors' own logs give the stall: the longest time between two of their
steps from the fault until two seconds after the replacement trains, without the time that a step usually takes.

    python benchmarks/survivors.py                        # the figures in benchmarks/README.md
    python benchmarks/survivors.py --replicas 2 --faults 1 --signals KILL --kinds replicas
    python benchmarks/survivors.py --torchft PYTHON       # with an interpreter that has torchft 0.2.0
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

WORKER = Path(__file__).with_name("survivors_worker.py")
STEPS_BEFORE = 15
"""Steps of all replicas before a fault."""
START_LIMIT = 120.0
CATCH_LIMIT = 90.0
"""Seconds until all replicas train again after a fault."""
SETTLE = 2.0


class Line(NamedTuple):
    """A step that a process completed."""

    step: int
    pid: int
    ranks: int
    time: float
    loss: float


class Fault(NamedTuple):
    """What a fault cost. Times are seconds."""

    kind: str
    replicas: int
    signal: str
    stall: float
    parts: dict[str, float]
    """The longest stall between two steps without the victim's loss, with it, and with its return."""
    healing: float
    """From the fault to the first step of the replacement; -1: none came in time."""
    repeated: int
    """Steps that a survivor completed twice."""
    skipped: int
    """Step numbers without any completed step."""
    kept: bool
    """True if the survivors' processes went on."""
    slowdown: float
    """Duration of a step while a replica is away, as a multiple of the usual one; 0: no such step."""


class Job:
    """One job of replicas."""

    def __init__(self, kind: str, replicas: int, directory: Path, torchft: str) -> None:
        self.kind, self.replicas, self.out = kind, replicas, directory
        directory.mkdir()
        self._children: list[subprocess.Popen[bytes]] = []
        self._ending = False
        self._output = (directory / "output").open("wb")
        env = {**os.environ, "DLROVER_STATE_DIR": str(directory / "state"), "OMP_NUM_THREADS": "1"}
        if kind != "torchft":
            option = [] if kind == "restart" else ["--survive"]
            command = [sys.executable, "-m", "dlrover.cli.run.run", *option]
            command += ["--nproc-per-node", str(replicas), "--max-restarts", "1000"]
            command += ["--rdzv-conf", "node_fault_limit=0"]  # all faults are of one node
            self._start([*command, str(WORKER), kind, str(directory)], env)
            return
        port = 20000 + random.randrange(20000)
        lighthouse = Path(torchft).with_name("torchft_lighthouse")
        bind = ["--bind", f"127.0.0.1:{port}", "--join_timeout_ms", "1000"]
        self._start([str(lighthouse), "--min_replicas", "1", *bind], env)
        env |= {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
            "NUM_REPLICA_GROUPS": str(replicas),
        }
        for rank in range(replicas):
            threading.Thread(target=self._keep, args=(torchft, rank, env), daemon=True).start()

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            command, env=env, stdout=self._output, stderr=self._output, start_new_session=True
        )
        self._children.append(child)
        return child

    def _keep(self, python: str, rank: int, env: dict[str, str]) -> None:
        """Start a replica of torchft again whenever it ends, at once, as its launcher would."""
        command = [python, str(WORKER), "torchft", str(self.out)]
        own = env | {"REPLICA_GROUP_ID": str(rank), "RANK": "0", "WORLD_SIZE": "1"}
        while not self._ending:
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + random.randrange(20000))}
            self._start(command, own).wait()

    def lines(self, rank: int) -> list[Line]:
        """Return what the processes of a rank have written."""
        path = self.out / f"rank{rank}.txt"
        rows = path.read_text().split("\n")[:-1] if path.exists() else []
        fields = [row.split() for row in rows]
        return [Line(int(f[0]), int(f[1]), int(f[2]), float(f[3]), float(f[4])) for f in fields]

    def wait_until_all_train(self, seconds: float, since: float = 0.0) -> bool:
        """Wait until all replicas have made some steps together in their present processes; False if the job ends."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._children[0].poll() is None:
            recent = [self.lines(rank)[-STEPS_BEFORE:] for rank in range(self.replicas)]
            if all(
                len(lines) == STEPS_BEFORE
                and len({line.pid for line in lines}) == 1
                and all(x.ranks == self.replicas and x.time > since for x in lines)
                for lines in recent
            ):
                return True
            time.sleep(0.1)
        return False

    def strike(self, name: str, chance: random.Random) -> Fault | None:
        """Send a signal to a random replica; return what it cost the others."""
        time.sleep(chance.uniform(0.0, 0.5))
        victim = chance.randrange(self.replicas)
        pid = self.lines(victim)[-1].pid
        before = {rank: self.lines(rank)[-1].pid for rank in range(self.replicas)}
        at = time.monotonic()
        os.kill(pid, getattr(signal, f"SIG{name}"))
        again = self.wait_until_all_train(CATCH_LIMIT, at)
        if not again and self.kind == "torchft" and name == "STOP":
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        survivors = [rank for rank in range(self.replicas) if rank != victim]
        back = [x for x in self.lines(victim) if x.time > at and x.pid != pid]
        healed = [x.time for x in back if x.ranks == self.replicas and x.step >= 0]
        joined = healed[0] if healed else 0.0
        stalls, repeated, slow = [], 0, []
        parts = {"lost": 0.0, "joined": 0.0, "other": 0.0}
        for rank in survivors:
            lines = self.lines(rank)
            usual = statistics.median(
                b.time - a.time
                for a, b in itertools.pairwise(lines)
                if at - 3 < a.time and b.time < at
            )
            last = max((x for x in lines if x.time <= at), key=lambda x: x.time)
            after = [x for x in lines if x.time > at]
            until = max(after[0].time if after else at, joined) + SETTLE
            near = [last, *(x for x in after if x.time <= until)]
            gaps = [b.time - a.time for a, b in itertools.pairwise(near)]
            stalls.append(max(gaps, default=CATCH_LIMIT) - usual)
            for (a, b), gap in zip(itertools.pairwise(near), gaps, strict=True):
                more = b.ranks - a.ranks
                part = "lost" if more < 0 else "joined" if more > 0 else "other"
                parts[part] = max(parts[part], gap - usual)
            numbers = [x.step for x in lines if x.time > at - 3 and x.step >= 0]
            repeated = max(repeated, len(numbers) - len(set(numbers)))
            away = [x for x in after if x.ranks < self.replicas]
            slow += [(b.time - a.time) / usual for a, b in itertools.pairwise(away)]
        done = {x.step for rank in range(self.replicas) for x in self.lines(rank)}
        return Fault(
            self.kind,
            self.replicas,
            name,
            max(stalls),
            parts,
            healed[0] - at if healed else -1.0,
            repeated,
            max(done) + 1 - len(done - {-1}),
            all(self.lines(rank)[-1].pid == before[rank] for rank in survivors),
            statistics.median(slow) if slow else 0.0,
        )

    def close(self) -> None:
        """End the job."""
        self._ending = True
        (self.out / "stop").touch()
        for child in list(self._children):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, signal.SIGTERM if self.kind != "torchft" else signal.SIGKILL)
                child.wait(20)
            child.kill()
        self._output.close()


def summary(faults: list[Fault], asked: int) -> dict[str, object]:
    """Return the figures of a job's faults."""
    stalls = sorted(fault.stall for fault in faults)
    healing = [fault.healing for fault in faults if fault.healing >= 0]
    return {
        "faults": len(faults),
        "asked": asked,
        "stall_median": statistics.median(stalls) if stalls else None,
        "stall_worst": stalls[-1] if stalls else None,
        "part_medians": {
            part: statistics.median(fault.parts[part] for fault in faults) if faults else None
            for part in ("lost", "joined", "other")
        },
        "healing_median": statistics.median(healing) if healing else None,
        "repeated_steps": sum(fault.repeated for fault in faults),
        "skipped_steps": max((fault.skipped for fault in faults), default=0),
        "processes_kept": sum(fault.kept for fault in faults),
        "slowdown": statistics.median(f.slowdown for f in faults) if faults else None,
    }


def main() -> None:
    """Run all jobs, print a line of JSON for each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--signals", nargs="+", default=["KILL", "STOP"])
    parser.add_argument("--kinds", nargs="*", default=["replicas", "unchanged", "restart"])
    parser.add_argument("--torchft", default="", help="Interpreter that has torchft 0.2.0.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "survivors.json"
    )
    args = parser.parse_args()
    kinds = [*args.kinds, *(["torchft"] if args.torchft else [])]
    results = []
    base = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        for replicas in args.replicas:
            for name in args.signals:
                for kind in kinds:
                    if kind == "restart" and name == "STOP":
                        continue  # its hang detection takes minutes by default
                    chance = random.Random(args.seed)
                    job = Job(kind, replicas, base / f"{kind}-{replicas}-{name}", args.torchft)
                    faults = []
                    try:
                        ready = job.wait_until_all_train(START_LIMIT)
                        while ready and len(faults) < args.faults:
                            faults.append(job.strike(name, chance))
                            ready = job.wait_until_all_train(CATCH_LIMIT, time.monotonic())
                    finally:
                        job.close()
                    row = {"kind": kind, "replicas": replicas, "signal": name}
                    row |= summary(faults, args.faults) | {"load": os.getloadavg()[0]}
                    row["stalls"] = [round(fault.stall, 4) for fault in faults]
                    row["parts"] = [
                        {part: round(stall, 4) for part, stall in fault.parts.items()}
                        for fault in faults
                    ]
                    results.append(row)
                    print(json.dumps(row), flush=True)
                    if len(faults) < args.faults:
                        print((job.out / "output").read_text()[-2000:], flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
