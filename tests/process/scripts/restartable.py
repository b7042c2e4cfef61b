"""A training function that is called again after a loss; ``python restartable.py OUT``."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import dlrover.training

out = Path(sys.argv[1])
calls: list[None] = []


@dlrover.training.restartable
def train() -> int:
    """Count to the number in the file ``last``; the checkpoint is a file."""
    calls.append(None)
    dist.init_process_group("gloo")
    rank, checkpoint, last = dist.get_rank(), out / "checkpoint", out / "last"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with (out / f"rank{rank}.txt").open("a", buffering=1) as log:
        while not (last.exists() and step >= int(last.read_text())):
            steps = torch.tensor([step])
            dist.all_reduce(steps)
            assert int(steps) == step * dist.get_world_size()
            step += 1
            if rank == 0:
                (out / "next").write_text(str(step))
                (out / "next").rename(checkpoint)
            dist.barrier()
            log.write(f"{step} {os.getpid()} {len(calls)}\n")
            time.sleep(0.05)
    return step


train()
