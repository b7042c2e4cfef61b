"""Trains a small model until the step in the file ``last``: ``survives.py PROGRAM OUT``; ``OUT`` gets what each rank did.

A line of ``rankN.txt``: ``begin PID``, or the step, whether it changed the weights, their sum, the norm of the gradients,
the pid, the time, and the samples of the step as ranges.
"""

import os
import sys
import time
from pathlib import Path

PROGRAM, OUT = sys.argv[1], Path(sys.argv[2])
LOG = (OUT / f"rank{os.environ['RANK']}.txt").open("a", buffering=1)
LOG.write(f"begin {os.getpid()}\n")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import dlrover.training  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from survives_model import BATCH, DROPOUT, PASS, PAUSE, Slow, loss_of, make, total  # noqa: E402

last = OUT / "last"
before = 0.0


def goes_on(step: int) -> bool:
    return not (last.exists() and step >= int(last.read_text()))


def note(step: int, weights: float, norm: float, samples: list[range]) -> None:
    """Write what became of a step."""
    global before  # noqa: PLW0603
    ranges = ",".join(f"{one.start}-{one.stop}" for one in samples)
    changed = int(weights != before)
    before = weights
    LOG.write(f"{step} {changed} {weights!r} {norm!r} {os.getpid()} {time.monotonic():.4f} {ranges}\n")  # fmt: skip


def store(weights: list[torch.Tensor]) -> None:
    if os.environ["RANK"] == "0":
        torch.save(weights, OUT / "weights.pt")


def replicas() -> None:
    """Train in a loop of one's own."""
    global before  # noqa: PLW0603
    model, optimizer, scheduler = make(torch.nn.Linear)
    before = total(model.parameters())
    own = dlrover.training.Replicas(
        model, optimizer, scheduler, global_batch_size=BATCH, micro_batch_size=PASS
    )
    for step in own.steps(1_000_000):
        dealt = []
        for samples in step:
            dealt.append(samples)
            step.backward(loss_of(model, samples, DROPOUT))
            time.sleep(PAUSE * PASS / BATCH)
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        optimizer.step()
        scheduler.step()
        note(step.number, total(model.parameters()), norm, dealt)
        if not goes_on(step.number):
            break
    store([p.detach() for p in model.parameters()])


def unchanged() -> None:
    """Train in a loop for DDP, or for HSDP with two ranks for each replica, that knows nothing of losses."""
    global before  # noqa: PLW0603
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if PROGRAM == "ddp":
        model, optimizer, scheduler = make(Slow)
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
        model, optimizer, scheduler = make(Slow, lambda part: fully_shard(part, mesh=mesh))

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if PROGRAM == "ddp" else tensor.full_tensor()).detach()

    before = total(map(whole, model.parameters()))
    step, more = 0, True
    while more:
        first = (step * world + rank) * PASS
        samples = range(first, first + PASS)
        optimizer.zero_grad()
        loss_of(model, samples).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(whole(torch.nn.utils.get_total_norm(gradients))) if gradients else 0.0
        optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            mean = loss_of(model, samples)
        dist.all_reduce(mean)  # as programs do that show a loss
        model.train()
        note(step, total(map(whole, model.parameters())), norm, [samples])
        more = goes_on(step)
        step += 1
    store([whole(p) for p in model.parameters()])
    dist.barrier()
    dist.destroy_process_group()


replicas() if PROGRAM == "replicas" else unchanged()
