"""A compiled model in DistributedDataParallel; a directory, where each rank writes its steps, until that in ``last``."""

import itertools
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

out = Path(sys.argv[1])
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
model = torch.compile(DistributedDataParallel(layers), backend="eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with (out / f"rank{os.environ['RANK']}.txt").open("a", buffering=1) as file:
    for step in itertools.count():
        samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(samples) - samples.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()
        time.sleep(0.03)
        weights = sum(p.detach().double().sum() for p in model.parameters())
        file.write(f"{step} {float(weights):.9f} {os.getpid()}\n")
        if (out / "last").exists() and step >= int((out / "last").read_text()):
            break
