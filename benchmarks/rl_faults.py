"""A reinforcement learning job whose trainer fails every ten steps: its role restarts alone, or the whole job does.

The durations are those that RobustRL publishes of 256 GPUs (USENIX OSDI 2026, arXiv 2512.22492). The real coordinator,
its service, masters and agents run on a virtual clock; a seed gives the same figures every time.
``benchmarks/README.md`` explains them.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrover.roles.spec import Failover
from tests.simulation.nodes import Delays
from tests.simulation.roles import ROLLOUT, Training, Workload

STEPS, EVERY = 100, 10
"""Steps of a job, and steps of which each group has a fault at a random instant (published)."""
MACHINES, PROMPTS = 16, 64
"""Machines with 8 GPUs of each role, and prompts of a step (published)."""
STEP, SAVE = 300.0, 3.0
"""Seconds of a step, of which a save takes 1 % (published)."""
RESTART, WHOLE = 173.0, 278.0
"""Seconds until the trainer is back if it restarts alone, and with the whole job (published of the model of 8B)."""
SCHEDULE, ENGINE, PULL = 60.0, 49.0, 10.0
"""Seconds of a rollout: scheduling and container, inference engine, weights (published of the model of 32B)."""
STOP = 1.0
"""Seconds to stop processes; part of `RESTART`."""


def workload(machines: int, steps: int) -> Workload:
    """The published job, without faults; rollouts and trainer need equally long for a batch."""
    after = RESTART - STOP
    trainer = Delays(launch=(WHOLE - RESTART,) * 2, start=(after,) * 2, stop=(STOP,) * 2)
    rollouts = Delays(launch=(SCHEDULE,) * 2, start=(ENGINE,) * 2, stop=(STOP,) * 2)
    work = STEP - SAVE
    return Workload(machines, steps, PROMPTS, work, work, SAVE, PULL, trainer, rollouts)


JOB = {"failover": Failover.JOB}
POLICIES: dict[str, dict[str, Any]] = {
    "the trainer alone": {},
    "the whole job; queues and cursors are kept": JOB,
    "the whole job, from its checkpoint alone": JOB | {"fresh": True},
    "one rollout (the faults are theirs)": {"victim": ROLLOUT},
}
"""What restarts."""


def run(load: Workload, seed: int) -> dict[str, float]:
    """The figures of one job."""
    training = Training(load, seed)
    try:
        training.finish()
        return {
            "seconds": training.seconds,
            "up": training.up,
            "again": training.generated / (load.steps * load.prompts) - 1,
            "stalest": training.stalest,
            "lessons": sum(training.lessons.values()),
            "unlearned": load.steps * load.prompts - len(training.lessons),
        }
    finally:
        training.close()


def main() -> None:
    """Simulate all policies; print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="jobs of each policy")
    parser.add_argument("--machines", type=int, default=MACHINES, help="of each role")
    parser.add_argument("--steps", type=int, default=STEPS)
    default = Path(__file__).parent / "results/rl_faults.json"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    began = time.process_time()
    load = workload(args.machines, args.steps)
    calm = run(load, 0)
    figures: dict[str, Any] = {"machines": args.machines, "steps": args.steps, "no faults": calm}
    print(f"without faults: {calm['seconds'] / 3600:.2f} h, up {calm['up']:.1%}", flush=True)
    print(
        "| what restarts | time | machines up | useful time | answered again |\n|---|---|---|---|---|"
    )
    for name, changes in POLICIES.items():
        found = []
        for seed in range(args.seeds):
            chance = random.Random(seed)
            faults = tuple(at + chance.uniform(0, EVERY) for at in range(0, args.steps, EVERY))
            found.append(run(replace(load, faults=faults, **changes), seed))
        figures[name] = found
        useful = [calm["seconds"] / each["seconds"] for each in found]
        cells = [
            f"+{1 / statistics.mean(useful) - 1:.1%}",
            f"{statistics.mean(each['up'] for each in found):.1%}",
            f"{statistics.mean(useful):.1%} [{min(useful):.1%}, {max(useful):.1%}]",
            f"{statistics.mean(each['again'] for each in found):.1%}",
        ]
        print(f"| {name} | {' | '.join(cells)} |".replace("%", " %"), flush=True)
    figures["cpu seconds"] = time.process_time() - began
    args.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
