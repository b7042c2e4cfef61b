"""A data-parallel training in which something happens: ``hangs.py OUT FAULT``.

A rank goes wrong once, at sample 8 of the first run of the workers: it sleeps, or it spins. Or rank 0
alone does something that takes long. Or the last rank is slow. Steps continue from ``OUT/done``.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - the compiler is there for the one fault that compiles
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STRIKE = 8
LONG = 5.0
STEP = 0.04
"""Seconds of a step; a slow rank takes three times as long, which no busy machine hides."""
FIRST_RUN = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
LAST_RANK = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


class Samples(Dataset):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == STRIKE and FIRST_RUN and LAST_RANK:
            if self.fault == "sleep":
                time.sleep(1000)
            if self.fault == "spin":
                spin()
        if self.fault == "slow data" and LAST_RANK:
            time.sleep(2 * STEP)
        return torch.ones(8)


def spin() -> None:
    count = 0
    while True:
        count += 1


class SlowToSave:
    def __reduce__(self) -> tuple[type, tuple[()]]:
        time.sleep(LONG)
        return SlowToSave, ()


def main(out: Path, fault: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    network = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    done = int((out / "done").read_text()) if (out / "done").exists() else 0
    steps = 400 if fault.startswith("slow") else 30
    dist.barrier()
    if fault == "long start" and dist.get_rank() == 0:
        time.sleep(LONG)
    if fault == "long compile":
        torch.compile(torch.neg, backend=slow_backend)(torch.ones(2))
    for step, batch in enumerate(DataLoader(Samples(fault), batch_size=1), start=1):
        time.sleep(3 * STEP if fault == "slow rank" and LAST_RANK else STEP)
        optimizer.zero_grad()
        network(batch).sum().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            (out / "done").write_text(str(done + step))
        if step == STRIKE and dist.get_rank() == 0:
            interlude(network, fault, out)
        if done + step >= steps:
            break
    # Before the group: if the reducer holds it last, PyTorch joins gloo's thread with the interpreter's lock held,
    # and that thread may need the lock to drop the barrier's work.
    del network
    dist.barrier()
    dist.destroy_process_group()


def interlude(network: torch.nn.Module, fault: str, out: Path) -> None:
    """What rank 0 does while the others wait for it."""
    if fault == "long evaluation":
        network.eval()
        time.sleep(LONG)
        network.train()
    if fault == "long checkpoint":
        torch.save(SlowToSave(), out / "checkpoint.pt")


def slow_backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
    time.sleep(LONG)
    return graph


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
