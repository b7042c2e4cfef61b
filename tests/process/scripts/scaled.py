"""Training whose state is spread over the ranks and in memory only: ``scaled.py OUT STEPS STEP_TIME``.

The sum of the state is the sum of the numbers of all steps, each counted `SIZE` times. ``OUT/steps`` has a line
for each step that was completed, ``OUT/starts`` one for each start: world size, first step, where the state came from.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - nothing here is compiled

from dlrover.checkpoint import Checkpointer, Shard

SIZE = 12


def main(out: Path, steps: int, step_time: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part = torch.zeros(SIZE // world_size)
    at = rank * len(part)
    state = {"numbers": Shard(part, (SIZE,), (at,)), "step": 0}
    checkpointer = Checkpointer(out / "steps-in-memory", linger=1.0)
    record = checkpointer.load(state)
    if rank == 0:
        source = record.source if record else "nowhere"
        note(out / "starts", f"{world_size} {state['step']} {source}")
    for step in range(state["step"] + 1, steps + 1):
        dist.all_reduce(torch.ones(1))
        part += step
        state["step"] = step
        checkpointer.save(step, state, to="memory")
        if rank == 0:
            note(out / "steps", f"{step} {world_size}")
        time.sleep(step_time)
    total = part.sum()
    dist.all_reduce(total)
    if rank == 0:
        sys.stdout.write(f"sum {total.item():.0f} after step {steps}\n")
    checkpointer.close()
    dist.destroy_process_group()


def note(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
