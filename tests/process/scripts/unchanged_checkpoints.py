"""A program for DistributedDataParallel that saves each fifth step and knows nothing of losses."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - nothing here is compiled
from torch.nn.parallel import DistributedDataParallel

from dlrover.checkpoint import Checkpointer

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
torch.set_num_threads(1)


class Slow(torch.nn.Linear):
    """A model that takes the time of a step; a rank that returns to its place does not compute it."""

    def forward(self, samples):
        time.sleep(0.02)
        return super().forward(samples)


model = DistributedDataParallel(Slow(16, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
out, last = Path(sys.argv[1]), Path(sys.argv[1]) / "last"
checkpointer = Checkpointer(out / "checkpoints")
state = {"model": model, "optimizer": optimizer, "samples": 0}
loaded = checkpointer.load(state)
step = loaded.step if loaded else 0
own = out / f"rank{rank}.txt"
number = os.open(own, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # `open` writes nothing on the way
os.write(number, f"begin {step} {os.getpid()}\n".encode())
os.close(number)
with own.open("a", buffering=1) as log:
    while not (last.exists() and step >= int(last.read_text())):
        data = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 2 + rank))
        optimizer.zero_grad()
        (model(data) - data).square().mean().backward()
        optimizer.step()
        step += 1
        state["samples"] += len(data)
        assert state["samples"] == 4 * step
        weights = sum(float(p.detach().double().sum()) for p in model.parameters())
        log.write(f"{step} {weights:.9f} {os.getpid()}\n")
        if rank == 1 and step == 50 and (out / "late").exists():
            (out / "late").unlink()
            time.sleep(60)  # it is killed before its part of the save
        if step % 5 == 0:
            checkpointer.save(step, state)
        if step % 50 == 0:
            checkpointer.save(step, state, "storage")
            checkpointer.wait()
checkpointer.save(step, state, "storage")
checkpointer.wait()
checkpointer.close()
dist.destroy_process_group()
