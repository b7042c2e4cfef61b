"""Trains two epochs on any number of workers with each wrapper, and compares with plain PyTorch on all samples."""

import copy
import gc
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dlrover.training.sampler import ElasticDistributedSampler
from dlrover.training.trainer import ElasticTrainer

SIZE = 7
dist.init_process_group("gloo")
inputs = torch.randn(17, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2)
torch.manual_seed(1)
network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = ElasticDistributedSampler(dataset)
    trainer = ElasticTrainer(model, optimizer, sampler, global_batch_size=SIZE, micro_batch_size=1)
    loader = DataLoader(dataset, batch_sampler=trainer.batches)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for some, targets in loader:
            trainer.backward(mse_loss(model(some), targets))
            trainer.step()
    return trainer.loss()


def train_alone(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = ElasticDistributedSampler(dataset, 1, 0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for chosen in sampler.order().split(SIZE):
            loss = mse_loss(model(inputs[chosen]), dataset.tensors[1][chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def check(wrap, whole):
    model = wrap(copy.deepcopy(network))
    loss = train(model)
    for parameter, right in zip(whole(model), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, right.detach(), rtol=1e-10, atol=1e-12)
    assert abs(loss - expected_loss) < 1e-12, (loss, expected_loss)
    if dist.get_rank() == 0:
        sys.stdout.write(f"{type(model).__name__} is right\n")


def gathered(model):
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


warnings.simplefilter("ignore")  # of FSDP about CPUs
expected = copy.deepcopy(network)
expected_loss = train_alone(expected)
check(DistributedDataParallel, lambda model: [p.detach() for p in model.parameters()])
check(fully_shard, lambda model: [p.full_tensor().detach() for p in model.parameters()])
device = torch.device("cpu")
check(
    lambda model: FullyShardedDataParallel(model, device_id=device, use_orig_params=True), gathered
)
gc.collect()  # wrappers are cycles that hold process groups, whose threads have to end before the interpreter does
dist.destroy_process_group()
