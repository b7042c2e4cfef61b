"""GRPO as a job of five roles (example 06), one process of which is killed every 10 to 20 seconds; beside undisturbed runs.

Of each run the coordinator's journal is replayed: it has every version of the weights, every batch with the processes and versions
that made it, and every acknowledgement, with their times. ``benchmarks/README.md`` explains the figures.

    python benchmarks/roles_faults.py --json benchmarks/results/roles_faults.json
    python benchmarks/roles_faults.py --seeds 1 --calm 1        # a smoke test
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dlrover.cli.roles import status
from dlrover.errors import DLRoverError, ProtocolError
from dlrover.roles.coordinator.journal import RolesJournal
from dlrover.roles.machine.members import LIVE, RoleMembers
from dlrover.roles.machine.shared import SharedState
from dlrover.roles.messages import JoinRole, PutItems, QueueStatus, RoleInput, Version
from dlrover.roles.runtime import payload, wire
from dlrover.spec.jobdir import JobDir, MasterAddress

JOB = Path(__file__).parents[1] / "examples" / "06_grpo" / "job.py"
INSTANCES = {"trainer": 2, "rollout": 2, "reference": 1, "reward": 1, "main": 1, "coordinator": 1}
"""Processes of each role that may be killed, each as likely as another."""
BETWEEN = (10.0, 20.0)
"""Seconds between two kills."""
TWICE = 0.25
"""Chance that a kill is of the same instance as the one before."""
AHEAD, ROLLOUT_TIME = 64, 0.3
"""Room of the queue, and seconds that rollouts idle in each call: they are slower than the trainer, as in real jobs."""
LAST = 50
"""Batches at the end whose mean reward counts: that of the greedy answers in the end varies less."""
WARM = 10
"""Batches at the start that do not count for the rate."""
BEFORE = 5.0
"""Seconds before the death of a trainer with whose rate that after it is compared, too."""
PUSHED = 1.0
"""Seconds after a rollback until every process knows of it."""
LIMIT = 300.0
"""Seconds after which nothing is killed any more, and after as many more a run that has not ended counts as stuck."""


class Kill(NamedTuple):
    """A process that was killed."""

    time: float
    role: str
    index: int


class History:
    """What a coordinator's journal tells of a job that has ended."""

    def __init__(self, path: Path) -> None:
        self.puts: list[float] = []
        self.samples: list[dict[str, Any]] = []
        self.rewards: list[float] = []
        """Mean reward of each batch."""
        self.steps: list[tuple[float, tuple[int, int]]] = []
        """Time and life of the trainer of each acknowledgement."""
        self.lives: list[tuple[float, tuple[int, int]]] = []
        """Lives of the trainer, from when they joined."""
        self.whole: list[tuple[float, bool]] = [(0.0, False)]
        """From when all processes beside the trainer's were there, or not."""
        self.joined: dict[int, float] = {}
        self.serving: dict[int, float] = {}
        """When each process has joined, and when each rollout has served first, by pid."""
        self.published: dict[Version, float] = {}
        self.replaced: dict[Version, float] = {}
        self.undone: dict[Version, float] = {}
        """When each version became current, when a newer one did, and when the trainer went back behind it."""
        self.most_waiting = 0
        self._shared = SharedState(RoleMembers(frozenset({"trainer"})))
        decoder = msgspec.msgpack.Decoder(RoleInput)
        with contextlib.closing(RolesJournal(path, read_only=True)) as journal:
            for now, entry in journal.entries():
                if isinstance(entry, bytes):
                    self._replay(now, decoder.decode(entry))
        self.queue = self._shared.status().queues["samples"]

    def _replay(self, now: float, event: RoleInput) -> None:
        before = self._queue()
        try:
            self._shared.handle(event)
        except ProtocolError:  # it was refused the first time, too
            return
        after = self._queue()
        if isinstance(event, PutItems) and after.added > before.added:
            self.puts.append(now)
            (sample,) = [payload.decode(*wire.unpacked(item)) for item in event.items]
            self.samples.append(sample)
            self.rewards.append(statistics.mean(map(statistics.mean, sample["rewards"])))
        elif after.done > before.done:
            self.steps.append((now, event.place.life))
        elif isinstance(event, JoinRole):
            self.joined.setdefault(event.pid, now)
            if event.place.role == "trainer":
                self.lives.append((now, event.place.life))
        self.most_waiting = max(self.most_waiting, after.waiting)
        members = [one for of in self._shared.members.roles.values() for one in of.values()]
        whole = all(one.state == LIVE for one in members if one.place.role != "trainer")
        if whole != self.whole[-1][1]:
            self.whole.append((now, whole))
        for one in self._shared.members.roles.get("rollout", {}).values():
            if one.serving:
                self.serving.setdefault(one.pid, now)
        self._note_versions(now)

    def _queue(self) -> QueueStatus:
        queues = self._shared.queues.queues
        return queues["samples"].status() if "samples" in queues else QueueStatus()

    def _note_versions(self, now: float) -> None:
        weights = self._shared.weights.get("weights")
        if weights is None:
            return
        if weights.current is not None and weights.current not in self.published:
            for older in self.published.keys() - self.replaced.keys():
                self.replaced[older] = now
            self.published[weights.current] = now
        view = weights.view()
        for version in self.published.keys() - self.undone.keys():
            if not view.valid(version):
                self.undone[version] = now

    def stale(self) -> tuple[list[str], list[float]]:
        """Answers that no rollout should have given, and for how long the version of each answer was no longer the newest."""
        wrong, ages = [], []
        for sample in self.samples:
            began, answered = sample["between"]
            for (epoch, step), pid in {
                (tuple(v), by) for v, by in zip(sample["versions"], sample["by"], strict=True)
            }:
                version = Version(epoch, step)
                what = f"batch {sample['batch']}, version {version}, pid {pid}"
                if self.published.get(version, math.inf) > answered:
                    wrong.append(f"{what}: was not published")
                if self.undone.get(version, math.inf) < began - PUSHED:
                    wrong.append(f"{what}: undone {began - self.undone[version]:.1f} s before")
                if self.replaced.get(version, math.inf) < self.joined[pid]:
                    wrong.append(f"{what}: a newcomer with old weights")
                if self.serving.get(pid, math.inf) > answered:
                    wrong.append(f"{what}: it did not serve yet")
                ages.append(max(0.0, began - self.replaced.get(version, math.inf)))
        return wrong, ages

    def away(self, kills: list[Kill]) -> list[tuple[float, float]]:
        """From each kill of a trainer's rank to the next step, if no other role is away then."""
        found = []
        for kill in kills:
            if kill.role != "trainer":
                continue
            life = max(life for at, life in self.lives if at < kill.time)
            end = next((at for at, by in self.steps if at > kill.time and by > life), None)
            alone = not any(kill.time < other.time < (end or 0) for other in kills)
            if end is not None and alone and self.is_whole(kill.time):
                found.append((kill.time, end))
        return found

    def is_whole(self, now: float) -> bool:
        """Whether all processes beside the trainer's were there at a time."""
        return [whole for at, whole in self.whole if at <= now][-1]

    def put_between(self, began: float, ended: float) -> int:
        """Batches that came into the queue meanwhile."""
        return sum(began < at <= ended for at in self.puts)


class Run:
    """One job, to its end. Its processes end with this one."""

    def __init__(self, folder: Path, steps: int, seed: int | None) -> None:
        self.folder, self.steps, self.kills = folder, steps, list[Kill]()
        self._dir = JobDir(folder / "job")
        folder.mkdir(parents=True)
        settings = {
            "STEPS": steps,
            "AHEAD": AHEAD,
            "ROLLOUT_TIME": ROLLOUT_TIME,
            "OUT": folder / "out",
        }
        command = [
            sys.executable,
            "-m",
            "dlrover.cli.main",
            "roles",
            JOB,
            "--job-dir",
            self._dir.path,
        ]
        began = time.monotonic()
        with (folder / "log").open("wb") as log:
            self._job = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env={
                    **os.environ,
                    **{f"GRPO_{key}": str(value) for key, value in settings.items()},
                },
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_until((folder / "out" / "learned.jsonl").exists)
            if seed is not None:
                self._strike(random.Random(seed))
            self._wait_until(lambda: False)
        finally:
            self.code = self._job.poll()
            self._job.kill()  # all that it has started follows it
            self._job.wait()
        self.seconds = time.monotonic() - began

    def _wait_until(self, condition: Any, limit: float = LIMIT) -> bool:
        """Whether a condition has come true before the job's end, and in time."""
        late = time.monotonic() + limit
        while self._job.poll() is None and time.monotonic() < late:
            if condition():
                return True
            time.sleep(0.05)
        return False

    def _strike(self, chance: random.Random) -> None:
        victim, late = None, time.monotonic() + LIMIT
        while time.monotonic() < late:
            due = time.monotonic() + chance.uniform(*BETWEEN)
            another = chance.choice([(role, i) for role, n in INSTANCES.items() for i in range(n)])
            again = chance.random() < TWICE
            victim = victim if victim is not None and again else another
            self._wait_until(lambda at=due: time.monotonic() >= at)
            if not self._wait_until(lambda of=victim: self._kill(*of)):
                return

    def _kill(self, role: str, index: int) -> bool:
        """Kill a process; whether it was there."""
        try:
            if role == "coordinator":
                pid = msgspec.json.decode(self._dir.master.read_bytes(), type=MasterAddress).pid
            else:
                (found,) = [one for one in status(self._dir).status.roles if one.name == role]
                live = [one for one in found.instances if one.state in ("serving", "stale")]
                (pid,) = [one.pid for one in live if one.index == index]
            os.kill(pid, signal.SIGKILL)
        except (DLRoverError, ValueError, ProcessLookupError):  # it is just being started
            return False
        self.kills.append(Kill(time.time(), role, index))
        return True

    def figures(self) -> dict[str, Any]:
        """What is to be seen of the run."""
        found: dict[str, Any] = {"exit_code": self.code, "seconds": self.seconds}
        found["kills"] = [f"{role} {index}" for _, role, index in self.kills]
        if self.code != 0:
            return found
        history = History(self._dir.journal)
        result = json.loads((self.folder / "out" / "result.json").read_text())
        wrong, ages = history.stale()
        queue, once = history.queue, sorted(result["learned"]) == list(range(self.steps))
        away = history.away(self.kills)
        return found | {
            "reward": statistics.mean(history.rewards[-LAST:]),
            "greedy_reward": result["reward"],
            "learned_once": once and queue.done == queue.added == self.steps and not queue.lost,
            "redelivered": queue.redelivered,
            "versions": len(history.published),
            "rollbacks": len({version.epoch for version in history.published}) - 1,
            "answers_checked": len(ages),
            "stale": wrong,
            "seconds_behind": [statistics.median(ages), max(ages)],
            "most_waiting": history.most_waiting,
            "batches_per_second": (len(history.puts) - WARM)
            / (history.puts[-1] - history.puts[WARM - 1]),
            "away_seconds": [end - began for began, end in away],
            "away_batches": [history.put_between(*one) for one in away],
            "before_batches": [history.put_between(at - BEFORE, at) for at, _ in away],
        }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all runs; empty until there are some of each kind."""
    calm = [run for run in runs if run["seed"] is None]
    struck = [run for run in runs if run["seed"] is not None]
    if not calm or not struck:
        return {}
    rewards = [run["reward"] for run in calm]
    noise = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    least = statistics.mean(rewards) - 3 * noise * math.sqrt(1 + 1 / len(rewards))
    ended = [run for run in struck if run["exit_code"] == 0]
    away = [second for run in ended for second in run["away_seconds"]]
    rate = statistics.mean(run["batches_per_second"] for run in calm)
    batches = sum(sum(run["away_batches"]) for run in ended)
    before = sum(sum(run["before_batches"]) for run in ended) / BEFORE / max(1, len(away))
    return {
        "runs": len(struck),
        "kills": sum(len(run["kills"]) for run in struck),
        "ended with exit code 0": len(ended),
        "each prompt learned once": sum(run["learned_once"] for run in ended),
        "stale answers": sum(len(run["stale"]) for run in ended),
        "answers checked": sum(run["answers_checked"] for run in ended),
        "reward undisturbed, mean and standard deviation": [statistics.mean(rewards), noise],
        "least reward within the noise": least,
        "within the noise": sum(run["reward"] >= least for run in ended),
        "reward, mean and least": [
            f([run["reward"] for run in ended] or [0]) for f in (statistics.mean, min)
        ],
        "batches a second undisturbed": rate,
        "trainer away, times": len(away),
        "trainer away, median seconds": away and statistics.median(away),
        "rate while the trainer is away, of undisturbed": away and batches / sum(away) / rate,
        "of that before the kill": away and batches / sum(away) / before,
    }


def main() -> None:
    """Run all jobs, undisturbed ones among the others; print and keep the figures after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--calm", type=int, default=6, help="undisturbed runs")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--at-once", type=int, default=1, help="jobs that run at a time")
    parser.add_argument("--json", type=Path, help="figures so far, which more are added to")
    parser.add_argument("--keep", type=Path, help="keep what the jobs wrote here")
    args = parser.parse_args()
    kept: dict[str, Any] = {"runs": []}
    if args.json and args.json.exists():
        kept = json.loads(args.json.read_text())
    done = [run["seed"] for run in kept["runs"]]
    wanted: list[int | None] = [seed for seed in range(args.seeds) if seed not in done]
    for number in range(calm := args.calm - done.count(None)):
        wanted.insert(round(number * (len(wanted) / calm)), None)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.at_once) as pool:

        def run(number: int, seed: int | None) -> dict[str, Any]:
            what = "calm" if seed is None else f"seed{seed}"
            folder = (args.keep or Path(name)) / f"{len(done) + number}-{what}"
            figures = Run(folder, args.steps, seed).figures()
            return {"seed": seed, "load": os.getloadavg()[0], **figures}

        for task in as_completed([pool.submit(run, *one) for one in enumerate(wanted)]):
            kept["runs"].append(task.result())
            print(json.dumps(kept["runs"][-1]), flush=True)
            kept |= {"cpus": os.cpu_count(), "python": platform.python_version()}
            kept |= {"steps": args.steps, "all": summary(kept["runs"])}
            if args.json:
                args.json.write_text(json.dumps(kept, indent=1) + "\n")
    for what, value in kept["all"].items():
        print(f"{what:60} {value}")


if __name__ == "__main__":
    main()
