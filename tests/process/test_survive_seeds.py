"""Jobs of replicas with random disturbances: no survivor ends, and the training is one that nothing has disturbed.

``scripts/test-heavy tests/process/test_survive_seeds.py`` runs `SEEDS` of them, and prints with ``-rP`` what each has cost;
the variable ``SURVIVE_SEEDS=7,100-120`` names others.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from dlrover.spec import events
from tests.process.conftest import Launch
from tests.process.disturbances import FEWEST, LATER, MOST, PROGRAMS, Disturbance, Plan, plan

SEEDS = 50
VARIABLE = "SURVIVE_SEEDS"
SCRIPT = Path(__file__).parent / "scripts" / "survives.py"
ALONE = SCRIPT.with_name("survives_alone.py")
PATIENCE = 100.0
"""Seconds for what a job does within a few on an idle machine."""
POLL = 0.01
STEADY = 4
"""Steps of all ranks together before a disturbance."""
AFTER = 8
"""Steps after the last disturbance is over."""


class Line(NamedTuple):
    """What a process has written after a step."""

    step: int
    trained: bool
    weights: str
    norm: str
    pid: int
    time: float
    samples: str


class Log:
    """What the processes of a rank have written so far."""

    def __init__(self, path: Path) -> None:
        self.lines: list[Line] = []
        self.pids: list[int] = []
        """The processes of the rank, in the order of their beginnings."""
        self._path, self._read = path, 0

    def look(self) -> None:
        """Read what is new."""
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind("\n") + 1]
        self._read += len(whole)
        for row in whole.splitlines():
            first, *rest = row.split(" ")
            if first == "begin":
                self.pids.append(int(rest[0]))
            else:
                changed, weights, norm, pid, when, samples = rest
                self.lines.append(
                    Line(int(first), changed == "1", weights, norm, int(pid), float(when), samples)
                )

    def trained(self, pid: int) -> list[Line]:
        """Return the steps that a process has trained in."""
        return [line for line in self.lines if line.pid == pid and line.trained]

    @property
    def newest(self) -> Line | None:
        """The last step, if the present process has trained in it."""
        line = self.lines[-1] if self.lines else None
        return line if line and line.trained and self.pids[-1:] == [line.pid] else None


class Training:
    """A job whose plan is carried out."""

    def __init__(self, run, seed: int) -> None:
        self.plan: Plan = plan(seed)
        self.out: Path = run.directory
        plan_ = self.plan
        per_node = plan_.ranks // plan_.nodes
        nodes = [f"--local-nodes={plan_.nodes}"] if plan_.nodes > 1 else []
        options = ["--survive", *nodes, f"--nproc-per-node={per_node}", "--max-restarts=1000"]
        options += ["--rdzv-conf", "node_fault_limit=0"]  # many faults are of one node
        self.launch: Launch = run(*options, SCRIPT, plan_.program, self.out)
        self.logs = [Log(self.out / f"rank{rank}.txt") for rank in range(plan_.ranks)]
        self.strikes: list[tuple[float, str]] = []
        """When processes were hit, and how."""
        self.kept: dict[int, int] = {}
        """The process of each rank that trains and was not hit."""
        self.struck: set[int] = set()
        """The processes that were hit, and those of their rows."""

    # ---- what it does

    def look(self) -> None:
        """Read what the ranks have written."""
        for log in self.logs:
            log.look()

    def step(self) -> int:
        """Return the newest step."""
        return max((log.lines[-1].step for log in self.logs if log.newest), default=-1)

    def trains(self) -> list[int]:
        """Return the replicas whose ranks all train in living processes, and have made a step lately."""
        newest, row = self.step(), self.plan.row
        well = {
            rank
            for rank, log in enumerate(self.logs)
            if (line := log.newest)
            and line.step >= newest - 2
            and line.pid not in self.struck
            and _runs(line.pid)
        }
        return [r for r in range(self.plan.replicas) if set(range(r * row, r * row + row)) <= well]

    def until(self, holds, what: str):
        """Wait for what a job does within seconds; its steps are read meanwhile."""
        end = time.monotonic() + PATIENCE
        while True:
            self.look()
            if found := holds():
                return found
            if time.monotonic() > end or self.launch.process.poll() is not None:
                self.launch.until(lambda: False, 0, what)
            time.sleep(POLL)

    def wait_until_all_train(self) -> None:
        """Wait until all ranks have made steps together; those that were not hit are in their processes."""

        def together() -> bool:
            everyone = len(self.trains()) == self.plan.replicas
            return everyone and all(len(log.trained(log.pids[-1])) >= STEADY for log in self.logs)

        self.until(together, "training of all ranks")
        assert {rank: self.logs[rank].pids[-1] for rank in self.kept} == self.kept
        self.kept = {rank: log.pids[-1] for rank, log in enumerate(self.logs)}

    # ---- what is done to it

    def disturb(self, one: Disturbance) -> None:
        """Carry out a disturbance."""
        chance = random.Random(one.choice)
        if not one.early:
            self.wait_until_all_train()
        lost = self._strike_replicas(1, signal.SIGKILL, chance) if one.kind in LATER else []
        if one.kind == "source":
            returns = functools.partial(self.launch.events_of, events.ReplicaJoined)
            known = len(returns())
            self.until(lambda: len(returns()) > known, "a return")
        time.sleep(one.delay)
        match one.kind.removesuffix(" later"):
            case "agent":
                self._strike_agent(chance)
            case "master":
                self._strike(self.launch.wait_for("master", 1, PATIENCE), signal.SIGKILL, "master")
            case "returning":
                self._strike_returning(lost, chance)
            case kind:
                number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
                count = 2 if kind == "two" else 1
                self._strike_replicas(count, number, chance, lowest=kind == "source")

    def _strike_replicas(
        self, count: int, number: signal.Signals, chance: random.Random, *, lowest: bool = False
    ) -> list[int]:
        """Hit one rank of each of some replicas that train; another one is left. Return the ranks."""

        def enough() -> list[int]:
            found = self.trains()
            return found if len(found) > count else []

        found, row = self.until(enough, "replicas that train"), self.plan.row
        chosen = found[:count] if lowest else chance.sample(found, count)
        ranks = [replica * row + chance.randrange(row) for replica in chosen]
        self._strike_ranks(ranks, number)
        return ranks

    def _strike_returning(self, lost: list[int], chance: random.Random) -> None:
        """Hit a rank that was started again, wherever it is on its way."""
        row = self.plan.row
        rank = lost[0] - lost[0] % row + chance.randrange(row)
        log = self.logs[rank]
        self.until(lambda: log.pids[-1] not in self.struck and _runs(log.pids[-1]), "a new process")  # fmt: skip
        self._strike_ranks([rank], signal.SIGKILL)

    def _strike_ranks(self, ranks: Iterable[int], number: signal.Signals) -> None:
        """Hit the present processes of ranks, with which their rows are lost."""
        row = self.plan.row
        for rank in ranks:
            first = rank - rank % row
            for other in range(first, first + row):
                self.kept.pop(other, None)
                self.struck |= {self.logs[other].pids[-1]}
        processes = [psutil.Process(self.logs[rank].pids[-1]) for rank in ranks]
        self._strike(processes, number, f"{len(processes)} {number.name}")

    def _strike_agent(self, chance: random.Random) -> None:
        """Kill the agent of a node, with which its ranks are lost; a replica that trains is left."""
        plan_ = self.plan
        per_node = plan_.ranks // plan_.nodes

        def nodes() -> list[tuple[range, psutil.Process]]:
            found = []
            for node in range(plan_.nodes):
                ranks = range(node * per_node, (node + 1) * per_node)
                hit = {rank // plan_.row for rank in ranks}
                process = _agent_of(self.logs[ranks[0]])
                if process and set(self.trains()) - hit:
                    found.append((ranks, process))
            return found

        ranks, agent = chance.choice(self.until(nodes, "nodes that can be lost"))
        for replica in {rank // plan_.row for rank in ranks}:
            for rank in range(replica * plan_.row, (replica + 1) * plan_.row):
                self.kept.pop(rank, None)
                self.struck |= {self.logs[rank].pids[-1]}
        self._strike([agent], signal.SIGKILL, "agent")

    def _strike(self, processes: list[psutil.Process], number: signal.Signals, how: str) -> None:
        self.strikes.append((time.monotonic(), how))
        for process in processes:
            process.send_signal(number)

    # ---- its end

    def check(self) -> dict[str, object]:
        """End the training and check all of it; return what it has cost."""
        self.wait_until_all_train()
        last = self.step() + AFTER
        (self.out / "new").write_text(str(last))
        (self.out / "new").rename(self.out / "last")
        self.launch.succeed(PATIENCE)
        self.look()
        assert len(self.launch.events_of(events.RoundOpened)) == 1
        assert {rank: log.pids[-1] for rank, log in enumerate(self.logs)} == self.kept
        self._check_lines(last)
        self._check_sums(last)
        return self._cost()

    def _check_lines(self, last: int) -> None:
        """No process leaves out, repeats or forgets a step; all ranks have the same weights after it."""
        weights: dict[int, str] = {}
        for log in self.logs:
            assert log.lines[-1].step == last
            for pid in log.pids:
                lines = [line for line in log.lines if line.pid == pid]
                steps = [line.step for line in lines]
                assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
                trained = [line.trained for line in lines]
                assert trained == sorted(trained), "a rank that has trained trains no more"
                for line in log.trained(pid):
                    assert weights.setdefault(line.step, line.weights) == line.weights
        assert sorted(weights) == list(range(last + 1))

    def _check_sums(self, last: int) -> None:
        """The weights follow from the samples of the ranks that have trained, each sample once."""
        by_step: dict[int, dict[int, Line]] = {step: {} for step in range(last + 1)}
        for rank, log in enumerate(self.logs):
            for line in log.lines:
                if line.trained:
                    assert rank not in by_step[line.step], "a rank has made a step twice"
                    by_step[line.step][rank] = line
        given = "".join(
            " ".join([next(iter(lines.values())).weights, next(iter(lines.values())).norm, *map(str, lines)]) + "\n"
            for lines in by_step.values()
        )  # fmt: skip
        alone = [sys.executable, str(ALONE), self.plan.program, str(self.plan.ranks), str(self.out)]
        ended = subprocess.run(alone, input=given, text=True, capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr
        for step, ranks in enumerate(ended.stdout.splitlines()):
            lines = by_step[step]
            cut_off = {rank for rank, log in enumerate(self.logs) if _cut_off(log, step)}
            if self.plan.program == "replicas":
                dealt = sorted(itertools.chain(*(_ranges(line.samples) for line in lines.values())))
                assert len(dealt) == len(set(dealt)), f"step {step}: a sample is dealt twice"
                assert cut_off or len(dealt) == 24, f"step {step}: {len(dealt)} samples"
                continue
            took_part = set(map(int, ranks.split()))
            assert lines.keys() <= took_part <= lines.keys() | cut_off, f"step {step}"

    def _cost(self) -> dict[str, object]:
        """Return the figures of the job; a stall is the longest step of a survivor after a disturbance, less a usual one."""
        stalls = []
        for (at, how), (until, _) in itertools.pairwise([*self.strikes, (float("inf"), "")]):
            longest = []
            for log in self.logs:
                for pid in set(log.pids) - self.struck:
                    times = [line.time for line in log.trained(pid)]
                    gaps = [(a, b) for a, b in itertools.pairwise(times) if b > at and a < until]
                    if times and times[0] < at and gaps:
                        usual = statistics.median(b - a for a, b in itertools.pairwise(times))
                        longest.append(max(b - a for a, b in gaps) - usual)
            stalls += [(how, round(max(longest), 2))] if longest else []
        joins = len(self.launch.events_of(events.ReplicaJoined))
        return {"strikes": len(self.strikes), "joins": joins, "stalls": stalls}


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _agent_of(log: Log) -> psutil.Process | None:
    """Return the agent of a rank whose process lives."""
    try:
        zygote = psutil.Process(log.pids[-1]).parent()
        agent = zygote.parent() if zygote else None
        return agent if agent and "dlrover.agent" in agent.cmdline() else None
    except psutil.NoSuchProcess:
        return None


def _cut_off(log: Log, step: int) -> bool:
    """Return whether a process of the rank may have ended in a step, after it had done its part and before it wrote so."""
    last = dict.fromkeys(log.pids[:-1], -1)
    for line in log.lines:
        if line.pid in last:
            last[line.pid] = line.step
    return any(one in (-1, step - 1) for one in last.values())


def _ranges(samples: str) -> Iterable[int]:
    for one in filter(None, samples.split(",")):
        first, end = one.split("-")
        yield from range(int(first), int(end))


def _seeds() -> list[int]:
    chosen = os.environ.get(VARIABLE, f"0-{SEEDS - 1}")
    found: list[int] = []
    for part in chosen.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def test_plans_repeat_and_have_each_kind() -> None:
    plans = [plan(seed) for seed in range(SEEDS)]
    assert plans == [plan(seed) for seed in range(SEEDS)]
    for program in PROGRAMS:
        own = [one for one in plans if one.program == program]
        kinds = {disturbance.kind for one in own for disturbance in one.disturbances}
        assert kinds == {"kill", "stop", "two", "agent", "master", "agent later", *LATER}
    for one in plans:
        assert FEWEST <= len(one.disturbances) <= MOST
        assert one.ranks % one.nodes == 0
        for disturbance in one.disturbances:
            assert one.nodes > 1 or not disturbance.kind.startswith("agent")
            assert one.replicas > 2 or disturbance.kind not in ("two", "other", "source")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.heavy
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", _seeds())
def test_disturbances_change_nothing_for_those_that_are_well(run, seed: int) -> None:
    sys.stdout.write(f"seed {seed}: {plan(seed)}\n")
    training = Training(run, seed)
    for one in training.plan.disturbances:
        training.disturb(one)
    sys.stdout.write(f"result {json.dumps({'seed': seed, **training.check()})}\n")
