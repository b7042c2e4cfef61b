"""The training of ``ray_recovery.py``: 12.6 million parameters, DDP over gloo; a program, and a function for Ray Train.

Rank 0 appends a JSON line for each step, with its pid and the time; each start loads the same checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(out: Path) -> None:
    """Train until a file called ``stop`` appears."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(12)))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    checkpoint, batch = out / "checkpoint.pt", torch.ones(8, 1024)
    if checkpoint.exists():
        model.load_state_dict(torch.load(checkpoint, mmap=True, weights_only=True))
    (out / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    ends, step = torch.zeros(1), 0
    while not ends.item():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            with (out / "steps.jsonl").open("a") as log:
                log.write(json.dumps({"pid": os.getpid(), "time": time.time()}) + "\n")
            if step == 5 and not checkpoint.exists():
                torch.save(model.state_dict(), checkpoint)
            ends[0] = float((out / "stop").exists())
        dist.broadcast(ends, 0)
        time.sleep(0.02)


def loop(config: dict[str, str]) -> None:
    """Train as one worker of Ray Train, which has made the process group."""
    train(Path(config["out"]))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
    dist.destroy_process_group()
