"""Trains a small model in replicas until the step in the file ``last``; ``python replicas.py OUT PAUSE``."""

import os
import sys
import time
from pathlib import Path

import torch
import uncompiled  # noqa: F401 - nothing here is compiled

import dlrover.training

torch.manual_seed(1)
torch.set_num_threads(1)
data, classes = torch.randn(4096, 16), torch.randint(0, 4, (4096,))
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
replicas = dlrover.training.Replicas(
    model, optimizer, scheduler, global_batch_size=32, micro_batch_size=4
)
assert "torch.distributed.tensor" not in sys.modules, "a second of imports that no tensor needs"
out, pause = Path(sys.argv[1]), float(sys.argv[2])
last = out / "last"
with (out / f"rank{replicas.rank}.txt").open("a", buffering=1) as log:
    for step in replicas.steps(1_000_000):
        for samples in step:
            chosen = torch.arange(samples.start, samples.stop) % len(data)
            loss = torch.nn.functional.cross_entropy(model(data[chosen]), classes[chosen])
            step.backward(loss)
            time.sleep(pause / 8)
        optimizer.step()
        scheduler.step()
        log.write(f"{step.number} {step.loss:.12f} {os.getpid()} {len(replicas.ranks)}\n")
        if last.exists() and step.number >= int(last.read_text()):
            break
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    log.write(f"end {weights.double().sum():.12f} {os.getpid()}\n")
