"""A program for DistributedDataParallel that knows nothing of losses; it trains until the step in the file ``last``."""

import contextlib
import copy
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dlrover.errors import ConfigurationError
from dlrover.optim import EDiT

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
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=8)
group = dist.new_group(backend="gloo")  # of all ranks
with contextlib.suppress(ConfigurationError):
    dist.device_mesh.init_device_mesh("cpu", (world,))
    sys.exit("a mesh was made")
with contextlib.suppress(ConfigurationError):
    DistributedDataParallel(torch.nn.Linear(1, 1), static_graph=True)
    sys.exit("a static graph was taken")
with contextlib.suppress(ConfigurationError):
    model.register_comm_hook(None, allreduce_hook)
    sys.exit("a hook was taken")
with contextlib.suppress(ConfigurationError):
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    sys.exit("an optimizer was divided")
with contextlib.suppress(ConfigurationError):
    PeriodicModelAverager(2)
    sys.exit("an averager was made")
with contextlib.suppress(ConfigurationError):
    EDiT(torch.optim.AdamW(model.parameters()))
    sys.exit("replicas were to synchronize seldom")
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.99, patience=1)
twin = copy.deepcopy(model)
twin(data[:8][0]).sum().backward()
out, last = Path(sys.argv[1]), Path(sys.argv[1]) / "last"
step, goes_on = 0, True
with (out / f"rank{rank}.txt").open("a", buffering=1) as log:
    while goes_on:
        sampler.set_epoch(step)
        for batch, classes in loader:
            loss = torch.nn.functional.cross_entropy(model(batch), classes)
            optimizer.zero_grad()
            overflow = math.inf if step % 16 == 5 else 1.0
            scaler.scale(loss * overflow).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:  # the optimizer has made a step
                scheduler.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            plateau.step(mean)
            said, every = [f"by {rank}"], [None] * world
            dist.broadcast_object_list(said, 0)
            dist.all_gather_object(every, (rank, "x" * (rank + step % 3)), group=group)
            assert said[0].startswith("by")
            assert all(0 <= of < world for of, _ in every)
            sums, parts = torch.ones(1), [torch.zeros(1) for _ in range(world)]
            dist.reduce(sums, 1)
            dist.gather(torch.ones(1), parts if rank == 1 else None, 1)
            assert rank != 1 or (1 <= float(sums) <= world and sum(parts) == world)
            dist.gather_object(rank, every if rank == 2 else None, 2)
            dist.scatter_object_list(said, [[step, r] for r in range(world)], 1)
            assert said[0][1] == rank
            weights = sum(float(p.detach().double().sum()) for p in model.parameters())
            rate = f"{optimizer.param_groups[0]['lr']:.9f}*{scaler.get_scale():g}"
            log.write(f"{step} {weights:.9f} {os.getpid()} {rate}\n")
            time.sleep(0.02)
            goes_on = not (last.exists() and step >= int(last.read_text()))
            step += 1
            if not goes_on:
                break
dist.barrier()
dist.destroy_process_group()
