"""A training in the manner of the original's example of MNIST: its classes, its loop, nothing of ours."""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

from dlrover.python.common.storage import KeepLatestStepStrategy
from dlrover.python.training_event import TrainerProcess
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from dlrover.trainer.util.log_util import default_logger as logger

events = TrainerProcess("digits")


class Pictures(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(10, (size,), generator=generator)
        self.pictures = (
            torch.randn(size, 1, 8, 8, generator=generator) + self.labels[:, None, None, None]
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pictures[index], self.labels[index], index


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(144, 10)

    def forward(self, x):
        return F.log_softmax(self.fc(torch.flatten(F.relu(self.norm(self.conv(x))), 1)), dim=1)


@record
def train(args):
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    dataset = Pictures(args.size)
    sampler = ElasticDistributedSampler(dataset=dataset)
    loader = ElasticDataLoader(
        dataset=dataset, batch_size=args.batch_size, sampler=sampler, num_workers=1
    )
    model = DDP(Net())
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.1)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    checkpointer = DdpCheckpointer(
        args.out + "/checkpoints", deletion_strategy=KeepLatestStepStrategy(2, args.out)
    )
    with events.init().begin() as span, span.load_ckpt():
        state_dict = checkpointer.load_checkpoint()
    if "model" in state_dict:
        model.load_state_dict(state_dict["model"])
    if "optimizer" in state_dict:
        optimizer.load_state_dict(state_dict["optimizer"])
    if "sampler" in state_dict:
        loader.sampler.load_state_dict(state_dict["sampler"])
    step = state_dict.get("step", 0)
    logger.warning("rank %d starts at step %d", dist.get_rank(), step)
    trainer = ElasticTrainer(model, dataloader=loader)
    optimizer, scheduler = trainer.prepare(optimizer, scheduler)
    for epoch in range(loader.sampler.epoch, args.epochs):
        trainer.reset()
        scheduler.step()
        loader.sampler.set_epoch(epoch)
        for data, target, indices in loader:
            with trainer.step(True):
                optimizer.zero_grad()
                loss = F.nll_loss(model(data), target)
                loss.backward()
                optimizer.step()
            step += 1
            with open(f"{args.out}/taken-{dist.get_rank()}", "a") as file:
                file.write(f"{step} {epoch} {' '.join(map(str, indices.tolist()))}\n")
            if (
                step == args.die_at
                and dist.get_rank() == 1
                and "TORCHELASTIC_RESTART_COUNT" in os.environ
            ):
                if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    os._exit(1)
            state = {
                "step": step,
                "args": args,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "sampler": loader.sampler.state_dict(trainer.num_steps, loader.batch_size),
            }
            storage = StorageType.DISK if step % 5 == 0 else StorageType.MEMORY
            checkpointer.save_checkpoint(step, state, storage_type=storage)
    checkpointer.wait_latest_checkpoint()
    dist.barrier()
    print(f"loss {loss.item():.3f} after {step} steps", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--die_at", type=int, default=0)
    sys.exit(train(parser.parse_args()))
