"""A program for DistributedDataParallel that needs gradients, which a rank has none of on its way to the others."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - nothing here is compiled
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, out = dist.get_rank(), Path(sys.argv[1])
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step, goes_on, last = 0, True, out / "last"
with (out / f"rank{rank}.txt").open("a", buffering=1) as log:
    while goes_on:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad.clamp_(-1, 1)
        optimizer.step()
        log.write(f"{step} {os.getpid()}\n")
        time.sleep(0.02)
        goes_on = not (last.exists() and step >= int(last.read_text()))
        step += 1
dist.barrier()
dist.destroy_process_group()
