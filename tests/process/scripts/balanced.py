"""Trains on ranks of which the last one takes three times as long for a sample.

``balanced.py OUT READERS SECONDS``, with the seconds of a sample on the other ranks. Each rank writes what it trained
on, step by step; the parameters are compared with plain PyTorch on all samples.
"""

import copy
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - nothing here is compiled
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dlrover.training import balancing
from dlrover.training.sampler import ElasticDistributedSampler
from dlrover.training.trainer import ElasticTrainer

SIZE, PER_EPOCH, EPOCHS = 42, 20, 2
balancing.STEPS = 8


def main(out: Path, readers: int, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    each = seconds * (3 if rank == dist.get_world_size() - 1 else 1)
    samples = SIZE * PER_EPOCH - 5  # the last batch of an epoch is smaller
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 3, dtype=torch.float64, generator=numbers)
    dataset = TensorDataset(torch.arange(samples), inputs, inputs.sum(1, keepdim=True) ** 2)
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    alone = copy.deepcopy(network)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = ElasticDistributedSampler(dataset)
    trainer = ElasticTrainer(
        model, optimizer, sampler, global_batch_size=SIZE, micro_batch_size=8, balance=True
    )
    loader = DataLoader(dataset, batch_sampler=trainer.batches, num_workers=readers)
    steps: list[dict] = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        taken: list[int] = []
        for chosen, some, targets in loader:
            taken += chosen.tolist()
            time.sleep(each * len(chosen))
            trainer.backward(mse_loss(model(some), targets))
            if trainer.step():
                steps.append({"epoch": epoch, "taken": taken})
                taken = []
    train_alone(alone, dataset)
    for one, other in zip(network.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    (out / f"rank-{rank}").write_text(json.dumps(steps))
    dist.destroy_process_group()


def train_alone(model: nn.Module, dataset: TensorDataset) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = ElasticDistributedSampler(dataset, 1, 0)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for chosen in sampler.order().split(SIZE):
            optimizer.zero_grad()
            mse_loss(model(dataset.tensors[1][chosen]), dataset.tensors[2][chosen]).backward()
            optimizer.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
