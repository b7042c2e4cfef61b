"""The training program of ``recovery.py``: 12.6 million parameters, DDP over gloo, AdamW.

Rank 0 appends one JSON line for each step to a file, with the restart count and the time; the state is
kept in a checkpoint on tmpfs that every start loads.
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


def main(out: Path, steps: int) -> None:
    """Train for so many steps, or until a file called ``stop`` appears."""
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(12)))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    checkpoint = out / "checkpoint.pt"
    start = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, mmap=True, weights_only=True)
        model.load_state_dict(state["model"])
        start = state["step"]
    (out / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    batch = torch.ones(8, 1024)
    with (out / "steps.jsonl").open("a") as log:
        for step in range(start, steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if dist.get_rank() == 0:
                entry = {"step": step + 1, "restart": restart, "time": time.time()}
                log.write(json.dumps(entry) + "\n")
                log.flush()
                if step + 1 == 5 and not checkpoint.exists():
                    torch.save({"model": model.state_dict(), "step": step + 1}, checkpoint)
            if (out / "stop").exists():
                break
            time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
