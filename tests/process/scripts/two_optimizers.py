"""A program for DistributedDataParallel with an adversary, which knows nothing of losses; it trains until the step in ``last``.

Its models train in eval mode. Beside them, there are a parameter that the program trains by itself, and a layer with running
statistics. The gradients of ``slow`` are kept for 16 steps: it gets one less with each step of its optimizer.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - nothing here is compiled
from torch.nn.parallel import DistributedDataParallel

EVERY = 16


class Slow(torch.nn.Linear):
    """A layer that takes the time of a pass; a rank that returns to its place does not compute it."""

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(samples)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(1)
data = torch.randn(4096, 4)
generator = DistributedDataParallel(Slow(4, 4)).eval()
critic = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
).eval()
slow = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False)).eval()
torch.nn.init.constant_(slow.module.weight, 1000.0)
norm = torch.nn.BatchNorm1d(4, momentum=0.001, affine=False)
scale = torch.nn.Parameter(torch.ones(4))
of_critic = torch.optim.AdamW(critic.parameters(), lr=1e-3)
of_generator = torch.optim.AdamW([*generator.parameters(), scale], lr=1e-3)
of_slow = torch.optim.SGD(slow.parameters(), lr=1 / EVERY)
out, last = Path(sys.argv[1]), Path(sys.argv[1]) / "last"
step, goes_on = 0, True
with (out / f"rank{rank}.txt").open("a", buffering=1) as log:
    while goes_on:
        first = (step * world + rank) * 4
        real = data[torch.arange(first, first + 4) % len(data)]
        fake = generator(data[torch.arange(step, step + 4) % len(data)])  # the same on all ranks
        of_critic.zero_grad()
        (critic(fake.detach() * scale.detach()).mean() - critic(real).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        norm(fake.detach())
        (slow(torch.ones(1)).sum() - critic(fake * scale).mean()).backward()
        dist.all_reduce(scale.grad, op=dist.ReduceOp.AVG)
        of_generator.step()
        if step % EVERY == EVERY - 1:
            of_slow.step()
            of_slow.zero_grad()
        weights = [*generator.parameters(), *critic.parameters(), scale]
        total = sum(float(p.detach().double().abs().sum()) for p in weights)
        counted = (
            f"{float(slow.module.weight.detach()):.9f} {float(norm.running_var.double().sum()):.9f}"
        )
        log.write(f"{step} {total:.9f} {os.getpid()} {counted} {int(norm.num_batches_tracked)}\n")
        goes_on = not (last.exists() and step >= int(last.read_text()))
        step += 1
dist.barrier()
dist.destroy_process_group()
