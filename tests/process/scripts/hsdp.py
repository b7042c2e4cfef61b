"""A program for HSDP that knows nothing of losses; it trains until the step in the file ``last``."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(1)
data, classes = torch.randn(4096, 16), torch.randint(0, 4, (4096,))
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
model = torch.nn.Sequential(
    torch.nn.Linear(16, 31), torch.nn.Tanh(), torch.nn.BatchNorm1d(31, 1.0, affine=False), torch.nn.Linear(31, 4)
)  # fmt: skip
for part in (model[0], model[3], model):  # the root has buffers and no parameters of its own
    fully_shard(part, mesh=mesh)
before = torch.nn.Linear(16, 16)  # trained by the program itself, which keeps a mean of its weights
average = AveragedModel(before, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer.add_param_group({"params": list(before.parameters()), "lr": 1e-5})
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
out, last = Path(sys.argv[1]), Path(sys.argv[1]) / "last"
step, goes_on = 0, True
with (out / f"rank{rank}.txt").open("a", buffering=1) as log:
    while goes_on:
        for part in range(2):  # two passes for each step
            first = (step * 2 + part) * world * 4 + rank * 4
            chosen = torch.arange(first, first + 4) % len(data)
            model.set_requires_all_reduce(part == 1)
            logits = model(before(data[chosen]))
            logits /= 2
            loss = torch.nn.functional.cross_entropy(logits, classes[chosen])
            (loss / 2).backward()
        for parameter in before.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(before)
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=mesh.get_group("replicate"))
        weights = sum(
            float(p.full_tensor().detach().double().abs().sum()) for p in model.parameters()
        )
        weights += sum(float(p.detach().double().abs().sum()) for p in before.parameters())
        smooth = sum(float(p.detach().double().abs().sum()) for p in average.parameters())
        passes, rate = int(model[2].num_batches_tracked), optimizer.param_groups[0]["lr"]
        values = f"{rate:.9f} {float(norm):.9f} {passes} {smooth:.9f}"
        log.write(f"{step} {weights:.9f} {os.getpid()} {values}\n")
        time.sleep(0.02)
        goes_on = not (last.exists() and step >= int(last.read_text()))
        step += 1
dist.barrier()
dist.destroy_process_group()
