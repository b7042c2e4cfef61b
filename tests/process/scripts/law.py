"""Training whose step takes as long as a law says: ``law.py OUT LAW``; it waits instead of computing.

``LAW`` is the seconds of a step for 1, 2, ... workers, as ``0.1,0.11,0.12``; the first is the computation.
It trains until somebody stops it, and resumes from its last step. On nodes whose agent's pid stands in
``OUT/slow`` the computation takes twice as long.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - nothing here is compiled


def main(out: Path, law: list[float]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    compute, network = law[0], law[world_size - 1] - law[0]
    slow = out / "slow"
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    path = out / "step"
    step = int(path.read_text()) if path.exists() else 0
    due = time.monotonic()
    while True:
        due += compute * (2 if slow.exists() and is_ours(slow.read_text()) else 1)
        wait_until(due)
        optimizer.zero_grad()
        (weight - step).square().sum().backward()
        due += network
        wait_until(due)
        dist.all_reduce(weight.grad)
        optimizer.step()
        step += 1
        due = max(due, time.monotonic())
        if rank == 0:
            partial = out / f"step.{os.getpid()}"
            partial.write_text(str(step))
            partial.replace(path)


def is_ours(pid: str) -> bool:
    """Whether an agent is that of this worker: its parent's parent."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return stat.rpartition(")")[2].split()[1] == pid


def wait_until(due: float) -> None:
    time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [float(seconds) for seconds in sys.argv[2].split(",")])
