"""The training program of ``chaos.py``: a small model, DDP over gloo, Flash Checkpoint.

Every step is saved to memory, each 40th to storage. Rank 0 keeps one JSON line for each step and cuts the
file back to the step that it resumes from.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrover.checkpoint import Checkpointer


def main() -> None:
    """Train to the last step, from wherever the checkpoint is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step-time", type=float, default=0.05, help="seconds to idle in each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    checkpointer = Checkpointer(args.checkpoints, keep=3, interval=40)
    checkpointer.load(state)
    rank, log = dist.get_rank(), args.out / "steps.jsonl"
    if rank == 0:
        begin(log, state["step"])
    ddp_model = DistributedDataParallel(model)
    for step in range(state["step"], args.steps):
        batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(step * 64 + rank))
        loss = ddp_model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] = step + 1
        if rank == 0:
            with log.open("a") as file:
                entry = {"step": step + 1, "loss": loss.item(), "time": time.time()}
                file.write(json.dumps(entry) + "\n")
        checkpointer.save(step + 1, state)
        time.sleep(args.step_time)
    checkpointer.wait()
    checkpointer.close()
    dist.destroy_process_group()


def begin(log: Path, steps: int) -> None:
    """Cut the file of steps back to the first ``steps`` lines, and note this start."""
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    partial = log.with_suffix(".partial")
    partial.write_text("".join(lines[:steps]))
    partial.replace(log)
    with (log.parent / "starts").open("a") as file:
        file.write(f"{steps}\n")


if __name__ == "__main__":
    main()
