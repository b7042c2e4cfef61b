"""Trains on a quadratic of which each sample's gradient is mostly noise: ``noisy.py OUT``.

The batch of 8 may grow to 64. Each step writes a line: epoch, global batch, learning rate of the step, this rank's
samples. It trains until somebody stops it, and resumes from its last step.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - nothing here is compiled
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dlrover.training.sampler import ElasticDistributedSampler
from dlrover.training.trainer import ElasticTrainer

SAMPLES, NUMBERS = 4000, 200
PASS, SAMPLE, EXCHANGE = 0.012, 0.003, 0.009
"""Seconds."""


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.full((NUMBERS,), 0.1))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.place - samples).square().sum(1).mean()


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.arange(SAMPLES), 3 * torch.randn(SAMPLES, NUMBERS, generator=numbers)
    )
    model = DistributedDataParallel(Quadratic())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sampler = ElasticDistributedSampler(data)
    trainer = ElasticTrainer(
        model,
        optimizer,
        sampler,
        global_batch_size=8,
        micro_batch_size=32,
        learning_rate_rule="linear",
        reference_batch_size=8,
        max_global_batch_size=64,
    )
    saved = out / "state"
    if saved.exists():
        state = torch.load(saved)
        for name, part in (("model", model), ("optimizer", optimizer), ("sampler", sampler)):
            part.load_state_dict(state[name])
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    loader = DataLoader(data, batch_sampler=trainer.batches)
    lines = (out / f"steps-{rank}").open("a")
    taken: list[int] = []
    for epoch in range(sampler.epoch, 1000):
        sampler.set_epoch(epoch)
        for chosen, samples in loader:
            time.sleep(PASS + SAMPLE * len(chosen))
            trainer.backward(model(samples))
            time.sleep(EXCHANGE)
            taken += chosen.tolist()
            if not trainer.step():
                continue
            size = trainer.global_batch_size
            dist.barrier()  # no rank is ahead of what is saved
            if rank == 0:
                parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
                torch.save({k: part.state_dict() for k, part in parts.items()}, f"{saved}.new")
                os.replace(f"{saved}.new", saved)
            line = {"epoch": epoch, "at": sampler.consumed, "batch": size, "rate": rates[-1]}
            line["ranks"] = dist.get_world_size()
            print(json.dumps({**line, "taken": taken}), file=lines, flush=True)
            taken = []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
