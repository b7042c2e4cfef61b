"""A small training job that resumes: ``train.py OUT STEPS STEP_TIME``.

Each worker draws its share of every step's data by step number, so that a step computes the same
whenever it is done. ``OUT/losses.jsonl`` has a line for each step, ``OUT/checkpoint.pt`` every fifth.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - nothing here is compiled

SAVE_EVERY = 5
GLOBAL_BATCH = 12


def main(out: Path, steps: int, step_time: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    done = load(out / "checkpoint.pt", model, optimizer)
    note(out, rank, done)
    for step in range(done + 1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(GLOBAL_BATCH, 8, generator=generator)[rank::world_size]
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().sum() / GLOBAL_BATCH
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        dist.all_reduce(total := loss.detach())
        optimizer.step()
        if rank == 0:
            record = {"step": step, "loss": total.item(), "world_size": world_size}
            with (out / "losses.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            if step % SAVE_EVERY == 0:
                save(out / "checkpoint.pt", step, model, optimizer)
        time.sleep(step_time)
    dist.barrier()
    dist.destroy_process_group()


def note(out: Path, rank: int, done: int) -> None:
    """Write down who begins from which step; rank 0 drops the losses of steps to be done again."""
    process = {
        "rank": rank,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "from": done,
        "time": time.time(),
    }
    with (out / "starts.jsonl").open("a") as file:
        file.write(json.dumps(process) + "\n")
    losses = out / "losses.jsonl"
    if rank == 0 and losses.exists():
        kept = losses.read_text().splitlines(keepends=True)[:done]
        partial = out / "losses.partial"
        partial.write_text("".join(kept))
        partial.replace(losses)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the state of rank 0's choice; the steps that it had done."""
    state = torch.load(path) if path.exists() else {"step": 0}
    chosen = [state if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen)
    if chosen[0]["step"]:
        model.load_state_dict(chosen[0]["model"])
        optimizer.load_state_dict(chosen[0]["optimizer"])
    return chosen[0]["step"]


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    partial = path.with_suffix(".partial")
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, partial)
    partial.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
