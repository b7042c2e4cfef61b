"""A program for DistributedDataParallel that knows nothing of losses; it trains until the step in the file ``last``."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(960, 16), torch.randint(0, 4, (960,)))
sampler = DistributedSampler(data, world, rank)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
out, last = Path(sys.argv[1]), Path(sys.argv[1]) / "last"
step, goes_on = 0, True
with (out / f"rank{rank}.txt").open("a", buffering=1) as log:
    while goes_on:
        sampler.set_epoch(step)
        for batch, classes in loader:
            loss = torch.nn.functional.cross_entropy(model(batch), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            weights = sum(float(p.detach().double().sum()) for p in model.parameters())
            log.write(f"{step} {weights:.9f} {os.getpid()} {optimizer.param_groups[0]['lr']:.9f}\n")
            time.sleep(0.02)
            goes_on = not (last.exists() and step >= int(last.read_text()))
            step += 1
            if not goes_on:
                break
dist.barrier()
dist.destroy_process_group()
