"""Goodput of a job of 16,384 GPUs over 54 days, with DLRover's waits and with the original's.

A Monte Carlo of single steps, saves and faults: both columns of a row meet the same faults, share every cost that
is not the system's own, and are paid for 2,048 nodes all the time. The real job machine, agents' machines and ledger
then run a smaller job under the same assumptions, to check the arithmetic. ``benchmarks/README.md`` explains the
figures and has their sources.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrover.master.machine.spares import spares_for
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import JobSpec, Limits
from tests.simulation.cluster import Cluster
from tests.simulation.nodes import Delays, SimulatedNode

Range = tuple[float, float]

NODES, UNIT = 2048, 16
"""Nodes of the job, and of one of its replicas: a smaller world has a multiple of that."""
DAYS, INTERRUPTIONS = 54.0, 419
"""Published of the pre-training of Llama 3 405B on 16,384 GPUs: unexpected interruptions."""
SHARES = {"lost": 66.3, "worker": 21.9, "silent": 10.1, "hung": 1.7}
"""Per cent of them. Lost: GPU, HBM3, maintenance, SRAM, CPU, silent corruption, heat. A worker ends: software, and
what is not named. Silent: network, NIC. Hung: NCCL's watchdog."""
STEP = 6.2
"""Seconds of a step: 16 million tokens through 405 billion parameters at 400 TFLOP/s per GPU."""
SAVE_EVERY, STORE_EVERY = 10, 250
"""Steps between two saves to memory, and to storage."""
SAVE, STORE, LOAD, SEND = 0.2, 60.0, 115.0, 10.0
"""Seconds: that a save to memory blocks (published by the original), until a stored step is durable, to load one from
storage (published by the original, GLM-65B, before its loading was made faster), until a replica is with its peer."""
START, STOP, SPARE, REPAIR = (20.0, 60.0), (1.0, 5.0), (60.0, 180.0), (7200.0, 21_600.0)
"""Seconds to start the workers up to the first step, to stop them, until another node is there, until a node is
repaired where there is no other."""
RACK, RACK_SHARE = 16, 0.1
"""Nodes that a fault of a rack takes, and the part of lost nodes that are such a fault, where losses are correlated."""


@dataclass(frozen=True)
class System:
    """The waits of a system: its own code's, not the machines'."""

    name: str
    detection: dict[str, Range]
    """Seconds from a fault to the decision to restart, by kind."""
    rendezvous: Range
    """Seconds that a round takes beyond stopping and starting workers."""
    quiet: float
    """Seconds that a round with fewer nodes than the maximum waits for more."""
    reshapes_memory: bool
    """Whether a checkpoint in memory can be loaded by another number of nodes."""


OURS = System(
    "DLRover",
    {"lost": (0.0, 0.3), "worker": (0.0, 0.2), "silent": (60.0, 75.0), "hung": (180.0, 185.0)},
    (0.1, 0.5),
    0.0,
    reshapes_memory=True,
)
ORIGINAL = System(
    "original",
    {"lost": (0.0, 5.0), "worker": (0.0, 5.0), "silent": (600.0, 615.0), "hung": (600.0, 605.0)},
    (5.0, 10.0),
    60.0,
    reshapes_memory=False,
)


@dataclass(frozen=True)
class Scenario:
    """What both systems meet."""

    name: str
    faults: float = 1.0
    """Times the published number."""
    shares: dict[str, float] = field(default_factory=lambda: SHARES)
    replicas: bool = False
    """Whether a lost node's memory is on another node, too."""
    racks: bool = False
    spares: bool = True
    nodes: int = NODES
    save: float = SAVE
    launch: Range = SPARE
    """Seconds until another node is there."""
    warm: int = 0
    """Spares that wait warm (``dlrover-run --spares``): paid for all the time, replaced like any lost node."""

    @property
    def auto(self) -> Scenario:
        """The same with the number of spares that ``--spares auto`` chooses for it."""
        gone = (self.shares.get("lost", 0.0) + self.shares.get("silent", 0.0)) / sum(
            self.shares.values()
        )
        rate = self.faults * gone * INTERRUPTIONS / DAYS / self.nodes
        wait = self.launch if self.spares else REPAIR
        return replace(self, warm=spares_for(self.nodes, rate, sum(wait) / 2))


SCENARIOS = (
    Scenario("published faults"),
    Scenario("memory has replicas", replicas=True),
    Scenario("2 x the faults", faults=2.0),
    Scenario("5 x the faults", faults=5.0),
    Scenario("5 x, replicas", faults=5.0, replicas=True),
    Scenario("every fault is a silent node", shares={"silent": 1.0}),
    Scenario("a tenth of the losses takes a rack", replicas=True, racks=True),
    Scenario("no spares: fewer nodes until repair", spares=False),
    Scenario("no spares, replicas", spares=False, replicas=True),
)

SCHEDULED = (450.0, 770.0)
"""Seconds until another node is there where its job is scheduled again, as ByteRobust reports for 128 to 1,024 machines
(454 to 768)."""
WITH_SPARES = (
    Scenario("another node in 60 to 180 s", replicas=True),
    Scenario("another node in 450 to 770 s", replicas=True, launch=SCHEDULED),
    Scenario("the same, 5 x the faults", replicas=True, faults=5.0, launch=SCHEDULED),
    Scenario("no other node until repair in 2 to 6 h", replicas=True, spares=False),
)
"""Scenarios that are compared with and without warm spares, for DLRover alone."""

Fault = tuple[float, str, int]
"""When, what, and how many nodes it takes."""


def faults(scenario: Scenario, seconds: float, interruptions: float, seed: int) -> list[Fault]:
    """The faults of a job, the same for both systems."""
    chance = random.Random(seed)
    found: list[Fault] = []
    at = 0.0
    while (at := at + chance.expovariate(scenario.faults * interruptions / seconds)) < seconds:
        kind = chance.choices(list(scenario.shares), list(scenario.shares.values()))[0]
        rack = scenario.racks and kind == "lost" and chance.random() < RACK_SHARE
        found.append((at, kind, 0 if kind in ("worker", "hung") else RACK if rack else 1))
    return found


class Training:
    """A world that trains since ``since`` from the step ``base``: what it has done until a moment."""

    def __init__(self, job: Job, since: float, base: int, nodes: int) -> None:
        self.since, self.base, self.nodes = since, base, nodes
        self._step = STEP * job.scenario.nodes / nodes
        self._cycle = SAVE_EVERY * self._step + job.scenario.save

    def until(self, now: float) -> tuple[int, int, float]:
        """Steps made, saves made, and seconds since the last whole step or save."""
        cycles, rest = divmod(max(0.0, now - self.since), self._cycle)
        more = min(SAVE_EVERY, int(rest / self._step))
        return int(cycles) * SAVE_EVERY + more, int(cycles), rest - more * self._step

    def saved(self, now: float) -> int:
        """The newest step that is whole in memory."""
        return self.base + SAVE_EVERY * self.until(now)[1]

    def stored(self, now: float) -> int:
        """The newest step that is durable; 0 if this world has stored none."""
        step = self.saved(now - STORE) // STORE_EVERY * STORE_EVERY
        return step if step > self.base else 0


class Job:
    """One simulated job. Its costs are node-seconds; all together they are the nodes times the wall time."""

    def __init__(self, system: System, scenario: Scenario, seed: int) -> None:
        self.system, self.scenario = system, scenario
        self.costs = dict.fromkeys(
            ("new steps", "saves", "steps again", "detection", "nodes awaited", "restart", "load",
             "nodes missing"), 0.0
        )  # fmt: skip
        self._chance = random.Random(seed)
        self._furthest = self._stored = 0
        self._repaired: list[float] = []
        # when each spare is ready
        self._warm = [0.0] * scenario.warm

    def run(self, struck: list[Fault], seconds: float) -> dict[str, float]:
        """Run for so long; node-seconds by what they went into."""
        self._pending = list(reversed(struck))
        world = Training(self, 0.0, 0, self.scenario.nodes)
        while True:
            # What happens while a planned round is formed is met at its end.
            back = max(world.since, self._grows_at(world.nodes))
            fault = max(world.since, self._pending[-1][0]) if self._pending else seconds
            now = min(fault, back, seconds)
            self._book(world, now)
            if now >= seconds:
                return self.costs
            restarted = self._strike(world) if fault <= back else self._grow(world, now)
            if restarted.since >= seconds:
                return self._end(restarted.since - seconds)
            world = restarted

    def _book(self, world: Training, now: float) -> None:
        steps, saves, cut = world.until(now)
        whole, nodes = self.scenario.nodes, world.nodes
        new = max(0, world.base + steps - self._furthest)
        self._furthest += new
        self._stored = max(self._stored, world.stored(now))
        self.costs["new steps"] += new * STEP * whole
        self.costs["steps again"] += (steps - new) * STEP * whole + cut * nodes
        self.costs["saves"] += saves * self.scenario.save * nodes
        self.costs["nodes missing"] += (whole - nodes) * (now - world.since)

    def _strike(self, world: Training) -> Training:
        """A fault, and those that come before training goes on."""
        first = max(world.since, self._pending[-1][0])
        nodes, resume, at = world.nodes, world.saved(first), first
        sent = world.saved(first - SEND) if self.scenario.replicas else -1
        while self._pending and self._pending[-1][0] <= at:
            struck, kind, lost = self._pending.pop()
            began = max(struck, first)
            spent = {"detection": self._draw(self.system.detection[kind])}
            stopping = self._draw(STOP)
            if lost:
                kept = max(sent, world.base) if lost == 1 and sent >= 0 else -1
                smaller, spent["nodes awaited"] = self._replace(nodes, began, lost)
                if smaller != nodes:
                    spent["nodes awaited"] += self.system.quiet
                if kept < 0 or (smaller != nodes and not self.system.reshapes_memory):
                    kept = self._stored
                    spent["load"] = LOAD
                nodes, resume = smaller, min(resume, kept)
            spent["restart"] = stopping + self._draw(self.system.rendezvous) + self._draw(START)
            at = self._stand_still(spent, began, at)
        return Training(self, at, resume, nodes)

    def _stand_still(self, spent: dict[str, float], began: float, until: float) -> float:
        """Charge the time from ``until`` on, up to which an earlier fault has been charged; when it is over."""
        at = began
        for cause, seconds in spent.items():
            charged = max(0.0, at + seconds - max(at, until))
            self.costs[cause] += charged * self.scenario.nodes
            at += seconds
        return max(at, until)

    def _replace(self, nodes: int, now: float, lost: int) -> tuple[int, float]:
        """The nodes of the next world, and how long it waits for them."""
        warm = sorted(at for at in self._warm if at <= now)[:lost]
        for at in warm:  # the node that is lost comes back as a spare
            wait = self.scenario.launch if self.scenario.spares else REPAIR
            self._warm[self._warm.index(at)] = now + self._draw(wait)
        lost -= len(warm)
        if self.scenario.spares:
            waits = [self._draw(self.scenario.launch) for _ in range(lost)]
            return nodes, max(waits, default=0.0)
        for _ in range(lost):
            heapq.heappush(self._repaired, now + self._draw(REPAIR))
        return self._largest(now), 0.0

    def _largest(self, now: float) -> int:
        away = sum(at > now for at in self._repaired)
        return (self.scenario.nodes - away) // UNIT * UNIT

    def _grows_at(self, nodes: int) -> float:
        """When enough nodes are back for a larger world."""
        return next(
            (at for at in sorted(self._repaired) if self._largest(at) > nodes), float("inf")
        )

    def _grow(self, world: Training, now: float) -> Training:
        """Take the repaired nodes in. The original stores the newest step for that, and loads it."""
        self._repaired = [at for at in self._repaired if at > now]
        heapq.heapify(self._repaired)
        spent = {
            "restart": self._draw(STOP) + self._draw(self.system.rendezvous) + self._draw(START)
        }
        if self._largest(now) < self.scenario.nodes:
            spent["nodes awaited"] = self.system.quiet
        if not self.system.reshapes_memory:
            spent["load"] = STORE + LOAD
        resume = world.saved(now)
        return Training(self, self._stand_still(spent, now, now), resume, self._largest(now))

    def _end(self, beyond: float) -> dict[str, float]:
        """The job's time is over while it stands still: what is charged beyond does not count."""
        self.costs["restart"] -= beyond * self.scenario.nodes
        return self.costs

    def _draw(self, bounds: Range) -> float:
        return self._chance.uniform(*bounds)


def compare(scenario: Scenario, days: float, seeds: int) -> dict[str, Any]:
    """Both systems in one scenario: means over the seeds."""
    seconds = days * 86_400.0
    rows: dict[str, Any] = {"scenario": scenario.name}
    for system in (OURS, ORIGINAL):
        found = []
        for seed in range(seeds):
            struck = faults(scenario, seconds, INTERRUPTIONS * days / DAYS, seed)
            costs = Job(system, scenario, seed).run(struck, seconds)
            wall = scenario.nodes * seconds
            assert abs(sum(costs.values()) - wall) < 1e-6 * wall, (system.name, scenario.name)
            found.append({cause: spent / wall for cause, spent in costs.items()})
        ratios = [costs["new steps"] for costs in found]
        rows[system.name] = {
            "goodput": statistics.mean(ratios),
            "deviation": statistics.stdev(ratios),
            "causes": {c: statistics.mean(f[c] for f in found) for c in found[0]},
        }
    return rows


def with_and_without(scenario: Scenario, days: float, seeds: int) -> dict[str, Any]:
    """DLRover in one scenario without and with warm spares; the spares' time is paid for like the nodes'."""
    seconds, row = days * 86_400.0, {"scenario": scenario.name}
    for name, one in (("without", scenario), ("with", scenario.auto)):
        found = []
        for seed in range(seeds):
            struck = faults(one, seconds, INTERRUPTIONS * days / DAYS, seed)
            costs = Job(OURS, one, seed).run(struck, seconds)
            found.append({cause: spent / (one.nodes * seconds) for cause, spent in costs.items()})
        ratios = [costs["new steps"] for costs in found]
        paid = one.nodes / (one.nodes + one.warm)
        row[name] = {
            "spares": one.warm,
            "steps": statistics.mean(ratios),
            "goodput": paid * statistics.mean(ratios),
            "deviation": statistics.stdev(ratios),
            "awaited": statistics.mean(f["nodes awaited"] + f["nodes missing"] for f in found),
        }
    return row


def table_of_spares(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows for the README: useful time of the job's nodes, and of all that are paid for."""
    yield "| 2,048 nodes, 54 days, replicas | spares | without: goodput | nodes awaited | with: goodput | nodes awaited | with, spares paid for |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        off, on = row["without"], row["with"]
        cells = (off["steps"], off["awaited"], on["steps"], on["awaited"], on["goodput"])
        shown = " | ".join(f"{cell:.2%}".replace("%", " %") for cell in cells)
        yield f"| {row['scenario']} | {on['spares']} | {shown} |"


def real(nodes: int, days: float, interruptions: int, seed: int) -> tuple[float, float]:
    """The goodput of the real machines and their ledger, and of the model, in the same small job."""
    limits = Limits(max_infrastructure_restarts=10**6, node_fault_limit=0, join_timeout=3600.0)
    sizes = {"min_nodes": nodes, "max_nodes": nodes, "managed_nodes": nodes}
    job = JobSpec(name="llama", max_restarts=10**6, limits=limits, **sizes)
    pause = {"start": (40.0, 40.0), "stop": (3.0, 3.0)}
    delays = Delays(launch=SPARE, step=(STEP, STEP), **pause)
    cluster = Cluster(job, nproc=8, steps=10**9, seed=seed, delays=delays, validate_every=10**9)
    cluster.program.checkpoint_every = SAVE_EVERY
    seconds = days * 86_400.0
    scenario = Scenario("check", nodes=nodes, replicas=True, save=0.0)
    struck = faults(scenario, seconds, interruptions, seed)
    for at, kind, _ in struck:
        cluster.time.after(at, _strike, cluster, kind)
    with contextlib.closing(cluster):
        cluster.run(seconds)
        cluster.machine.validate()
        cluster.ledger.validate()
        ledger = cluster.ledger.goodput(cluster.time.now)
    # The ledger counts nodes from their launch; the model counts all of them all the time.
    measured = ledger.seconds["productive"] / (nodes * seconds)
    exact = replace(OURS, detection={**OURS.detection, "silent": (60.0, 60.0)})
    modelled = Job(exact, scenario, seed).run(struck, seconds)["new steps"] / (nodes * seconds)
    return measured, modelled


def _strike(cluster: Cluster, kind: str) -> None:
    node = cluster.time.random.choice(list(cluster.alive.values()))
    strikes: dict[str, Callable[[SimulatedNode], None]] = {
        "lost": cluster.kill_agent,
        "worker": lambda node: cluster.kill_worker(node, FailureKind.SIGNAL),
        "hung": lambda node: cluster.kill_worker(node, FailureKind.SIGNAL),
        "silent": lambda node: cluster.silence(node, 600.0),
    }
    strikes[kind](node)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows for the README: goodput, and the time that is lost by one for each second that is by the other."""
    yield "| 2,048 nodes, 54 days | DLRover | original | lost: original / DLRover |"
    yield "|---|---|---|---|"
    for row in rows:
        ours, theirs = row[OURS.name], row[ORIGINAL.name]
        ratio = (1 - theirs["goodput"]) / (1 - ours["goodput"])
        cells = (f"{side['goodput']:.2%} ± {side['deviation']:.2%}" for side in (ours, theirs))
        yield f"| {row['scenario']} | {' | '.join(cells)} | {ratio:.2f} |".replace("%", " %")
    yield ""
    yield f"| {rows[0]['scenario']}: part of the time | DLRover | original |"
    yield "|---|---|---|"
    for cause in rows[0][OURS.name]["causes"]:
        cells = (f"{rows[0][system.name]['causes'][cause]:.2%}" for system in (OURS, ORIGINAL))
        yield f"| {cause} | {' | '.join(cells)} |".replace("%", " %")


def main() -> None:
    """Simulate all scenarios, check the model, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=DAYS)
    parser.add_argument("--seeds", type=int, default=20, help="Jobs of each scenario and system.")
    parser.add_argument("--spares", action="store_true", help="Only with and without warm spares.")
    default = Path(__file__).parent / "results/goodput.json"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()
    began = time.perf_counter()
    rows = [compare(scenario, args.days, args.seeds) for scenario in SCENARIOS * (not args.spares)]
    print("\n".join(table(rows) if rows else ()))
    spared = [with_and_without(scenario, args.days, args.seeds) for scenario in WITH_SPARES]
    print("\n" + "\n".join(table_of_spares(spared)))
    if args.spares:
        known = json.loads(args.output.read_text()) | {"spares": spared}
        args.output.write_text(json.dumps(known, indent=1) + "\n")
        return
    measured, modelled = real(nodes=16, days=3.0, interruptions=100, seed=1)
    print(
        f"\nThe real shells with 16 nodes and 100 faults in 3 days: {measured:.2%}; "
        f"this model: {modelled:.2%}."
    )
    print(f"{time.perf_counter() - began:.0f} s")
    check = {"measured": measured, "modelled": modelled}
    args.output.write_text(
        json.dumps({"scenarios": rows, "spares": spared, "real machines": check}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
