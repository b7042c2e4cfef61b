"""The training program of ``survivors.py``: 0.8 million parameters, AdamW, one replica per process.

``python survivors_worker.py KIND OUT`` with the kinds ``replicas`` (`dlrover.training.Replicas`), ``unchanged`` (DDP as it
is, under ``dlrover-run --survive``), ``restart`` (DDP with a memory checkpoint of each step) and ``torchft``. Each process
appends to a file of its rank, for each step: number, process, ranks that train, monotonic time, mean loss. It
trains until a file called ``stop`` appears.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

BATCH, MICRO = 32, 4
PAUSE = 0.005
"""Seconds of a micro-batch beside its computation."""
DEVICE = os.environ.get("SURVIVORS_DEVICE", "cpu")
"""All replicas use the same one; the collectives are gloo's."""
MOST = 1_000_000


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, the same in all processes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(12)]
    model = nn.Sequential(*layers).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def loss_of(model: nn.Module, first: int, count: int) -> torch.Tensor:
    """Return the mean loss of samples."""
    generator = torch.Generator().manual_seed(first)
    batch = torch.randn(count, 256, generator=generator).to(DEVICE)
    time.sleep(PAUSE)
    return (model(batch) - batch).square().mean()


class Log:
    """The steps of one process."""

    def __init__(self, out: Path, rank: int) -> None:
        self._stop = out / "stop"
        self._file = (out / f"rank{rank}.txt").open("a", buffering=1)

    def step(self, number: int, ranks: int, loss: float) -> bool:
        """Write a step; return whether the training goes on."""
        self._file.write(f"{number} {os.getpid()} {ranks} {time.monotonic():.5f} {loss:.9f}\n")
        return not self._stop.exists()


def replicas(out: Path) -> None:
    """Train with `Replicas`."""
    import dlrover.training  # noqa: PLC0415 - each kind has its own

    model, optimizer = model_and_optimizer()
    group = dlrover.training.Replicas(
        model, optimizer, global_batch_size=BATCH, micro_batch_size=MICRO
    )
    log = Log(out, group.rank)
    for step in group.steps(MOST):
        for samples in step:
            step.backward(loss_of(model, samples.start, len(samples)))
        optimizer.step()
        if not log.step(step.number, len(group.ranks), step.loss):
            os._exit(0)


def data_parallel(
    out: Path,
    save: Callable[..., object] | None = None,
    trains: Callable[[], int] | None = None,
    start: int = 0,
) -> None:
    """Train with DDP; ``save`` loads or saves a checkpoint, ``trains`` returns how many ranks train."""
    import torch.distributed as dist  # noqa: PLC0415 - each kind has its own

    rank, world = dist.get_rank(), dist.get_world_size()
    module, _ = model_and_optimizer()
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if save is not None:
        start = save(model, optimizer, None)
    log = Log(out, rank)
    for number in range(start, MOST):
        optimizer.zero_grad()
        share = BATCH // MICRO // world or 1
        for index in range(rank * share, (rank + 1) * share):
            last = index == (rank + 1) * share - 1
            model.require_backward_grad_sync = last
            (loss_of(model, number * BATCH + index * MICRO, MICRO) / share).backward()
        optimizer.step()
        if save is not None:
            save(model, optimizer, number + 1)
        if not log.step(number, trains() if trains is not None else world, 0.0):
            os._exit(0)


def unchanged(out: Path) -> None:
    """Train with DDP and nothing else."""
    import torch.distributed as dist  # noqa: PLC0415 - each kind has its own

    from dlrover.training.replicas import hooks  # noqa: PLC0415 - only to see who trains

    dist.init_process_group("gloo")

    def trains() -> int:
        rank = hooks._running[0]  # noqa: SLF001
        return 0 if rank.replaying else len(rank._survivors.ranks)  # noqa: SLF001

    data_parallel(out, trains=trains)


def restart(out: Path) -> None:
    """Train with DDP and a memory checkpoint of each step."""
    import torch.distributed as dist  # noqa: PLC0415 - each kind has its own

    from dlrover.checkpoint import Checkpointer  # noqa: PLC0415 - each kind has its own

    dist.init_process_group("gloo")
    checkpointer = Checkpointer(out / "checkpoints")

    def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int | None) -> int:
        state = {"model": model, "optimizer": optimizer}
        if step is None:
            loaded = checkpointer.load(state)
            return loaded.step if loaded is not None else 0
        checkpointer.save(step, state)
        return step

    data_parallel(out, save)


def torchft(out: Path) -> None:
    """Train with torchft, as its documentation shows."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # noqa: PLC0415 - each kind has its own

    module, inner = model_and_optimizer()
    rank = int(os.environ["REPLICA_GROUP_ID"])
    port = int(os.environ["MASTER_PORT"])
    _store = torch.distributed.TCPStore(  # torchrun would have one for each replica
        "127.0.0.1", port, is_master=True, wait_for_workers=False
    )
    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=lambda s: (module.load_state_dict(s["m"]), inner.load_state_dict(s["o"])),
        state_dict=lambda: {"m": module.state_dict(), "o": inner.state_dict()},
        replica_id=f"replica_{rank}",
    )
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, inner)
    log = Log(out, rank)
    world = int(os.environ["NUM_REPLICA_GROUPS"])
    going = True
    while going:
        number = manager.current_step()
        optimizer.zero_grad()
        share = BATCH // MICRO // world or 1
        total = sum(
            loss_of(model, number * BATCH + index * MICRO, MICRO)
            for index in range(rank * share, (rank + 1) * share)
        )
        (total / share).backward()
        optimizer.step()
        committed = manager.current_step() > number
        going = log.step(number if committed else -1, manager.num_participants(), 0.0)
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
