"""DDP training that prints its losses; at some step rank 1 dies once, as often as a marker file says."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlrover.checkpoint import Checkpointer

STEPS = 12
directory, deadly = Path(sys.argv[1]), int(sys.argv[2])
storage_every = int(sys.argv[3])
rank = int(os.environ.get("RANK", "0"))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
trained = DistributedDataParallel(model) if dist.is_initialized() else model
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
checkpointer = Checkpointer(directory, linger=60.0)
record = checkpointer.load(state)
if record is not None and rank == 0:
    print(f"loaded {record.step} from {record.source}", flush=True)  # noqa: T201
for step in range(state["step"], STEPS):
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = trained(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if rank == 0:
        print(f"loss {step} {loss.item():.17g}", flush=True)  # noqa: T201
    state["step"] = step + 1
    to_storage = storage_every and (step + 1) % storage_every == 0
    checkpointer.save(step + 1, state, to="storage" if to_storage else "memory")
    marker = directory / "died"
    if (
        step == deadly
        and rank == int(os.environ.get("WORLD_SIZE", "1")) - 1
        and not marker.exists()
    ):
        marker.touch()
        subprocess.run(["kill", "-KILL", str(os.getpid())], check=True)
checkpointer.wait()
checkpointer.close()
if dist.is_initialized():
    dist.destroy_process_group()
