"""The goodput of a job of 16,384 GPUs, simulated: 54 days with the interruptions that Llama 3 had.

The job machine, the agents' machines and the ledger are the real ones; time, processes and messages are
simulated. ``benchmarks/README.md`` explains the figures.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover.spec.failure import FailureKind
from dlrover.spec.job import JobSpec, Limits
from dlrover.testing.cluster import Cluster
from dlrover.testing.nodes import Delays, SimulatedNode

NODES, GPUS_PER_NODE = 2048, 8
DAYS, INTERRUPTIONS = 54.0, 419
"""Published of the pre-training of Llama 3 405B on 16,384 GPUs: unexpected interruptions."""
SHARES = {
    "a node is lost": 30.1 + 17.2 + 7.6 + 4.5 + 4.1 + 1.4 + 1.4,
    "a worker ends": 12.9 + 9.0,
    "a node falls silent": 8.4 + 1.7 + 1.7,
}
"""Per cent of the interruptions. Lost: GPU, HBM3, maintenance, SRAM, CPU, silent corruption, heat. A worker:
software, and what is not named. Silent: network, NIC, NCCL's watchdog."""
STEP = 6.2
"""Seconds of a step: 16 million tokens through 405 billion parameters at 400 TFLOP/s per GPU."""


@dataclass(frozen=True)
class Setting:
    """What differs between the systems."""

    name: str
    heartbeat_timeout: float
    steps_per_checkpoint: int
    start: tuple[float, float]
    """Seconds from the order to start workers to the first step, waits of the rendezvous included."""


OURS = Setting("DLRover", 60.0, 10, (20.0, 60.0))
ORIGINAL = Setting("with the original's waits", 600.0, 250, (80.0, 120.0))


def simulate(
    setting: Setting, nodes: int, days: float, interruptions: int, seed: int
) -> dict[str, Any]:
    """Run a job; its goodput.

    A simulated step stands for as many steps as lie between two checkpoints: a fault costs what was done
    of it, half of it on average.
    """
    block = setting.steps_per_checkpoint * STEP
    limits = Limits(
        heartbeat_timeout=setting.heartbeat_timeout,
        max_infrastructure_restarts=1_000_000,
        node_fault_limit=0,
        join_timeout=3600.0,
    )
    job = JobSpec(
        name="llama",
        min_nodes=nodes,
        max_nodes=nodes,
        managed_nodes=nodes,
        max_restarts=1_000_000,
        limits=limits,
    )
    delays = Delays(launch=(60.0, 180.0), start=setting.start, stop=(1.0, 5.0), step=(block, block))
    cluster = Cluster(
        job,
        nodes=0,
        nproc=GPUS_PER_NODE,
        steps=10**9,
        seed=seed,
        delays=delays,
        validate_every=10**9,
    )
    seconds = days * 86_400.0
    strikes: list[Callable[[SimulatedNode], None]] = [
        cluster.kill_agent,
        lambda node: cluster.kill_worker(node, FailureKind.SIGNAL),
        lambda node: cluster.silence(node, 10 * setting.heartbeat_timeout),
    ]
    counts = dict.fromkeys(SHARES, 0)

    def strike(node: SimulatedNode) -> None:
        what = cluster.time.random.choices(list(SHARES), list(SHARES.values()))[0]
        counts[what] += 1
        strikes[list(SHARES).index(what)](node)

    cluster.inject([strike], every=seconds / interruptions, until=seconds)
    began = time.perf_counter()
    cluster.run(seconds)
    cluster.machine.validate()
    cluster.ledger.validate()
    found = cluster.ledger.goodput(cluster.time.now)
    return {
        "setting": setting.name,
        "goodput": found.goodput_ratio,
        "seconds": found.seconds,
        "wall_seconds": found.wall_seconds,
        "interruptions": counts,
        "restarts": cluster.machine.restarts.count,
        "simulated_in": time.perf_counter() - began,
    }


def main() -> None:
    """Simulate both, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--days", type=float, default=DAYS)
    parser.add_argument("--interruptions", type=int, default=INTERRUPTIONS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results/goodput.json"
    )
    args = parser.parse_args()
    rows = [
        simulate(setting, args.nodes, args.days, args.interruptions, args.seed)
        for setting in (OURS, ORIGINAL)
    ]
    causes = [cause for cause in rows[0]["seconds"] if any(row["seconds"][cause] for row in rows)]
    print(f"| | {' | '.join(row['setting'] for row in rows)} |")
    print(f"|---|{'---|' * len(rows)}")
    print(f"| goodput | {' | '.join(format(row['goodput'], '.2%') for row in rows)} |")
    for cause in causes:
        shares = (format(row["seconds"][cause] / row["wall_seconds"], ".2%") for row in rows)
        print(f"| {cause} | {' | '.join(shares)} |")
    for row in rows:
        print(f"{row['setting']}: {row['interruptions']}, {row['simulated_in']:.0f} s to simulate")
    args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
