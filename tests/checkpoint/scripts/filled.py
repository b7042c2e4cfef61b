"""Ranks that train on while their disk is full: ``filled.py DISK NODE... ``, a process for each node's rank.

Each saves every step to memory, and each third to storage. After step 5 rank 0 fills the disk, after step 35
it gives the room back. Prints the longest time that a save took with a full disk, and the stored steps.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import open_store
from dlrover.errors import InfrastructureError


def say(found: dict) -> None:
    """Print a line in one write: ranks share the pipe."""
    sys.stdout.write(json.dumps(found) + "\n")


disk, sharded, *nodes = sys.argv[1:]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
directory = Path(nodes[rank * len(nodes) // size])
filler = Path(disk) / "somebody else's"
checkpointer = Checkpointer(directory, linger=0.0)
state = {"w": torch.ones(50_000)}
if sharded == "sharded":  # rank 0 has little, which fits
    state = {"w": torch.full((10 if rank == 0 else 50_000,), float(rank))}


def fill() -> None:
    facts = os.statvfs(disk)
    room = facts.f_bavail * facts.f_frsize - (64 << 10)  # what little a rank without tensors writes
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room)


longest = 0.0
for step in range(1, 39):
    dist.barrier()
    began = time.monotonic()
    checkpointer.save(step, state, to="storage" if step % 3 == 0 else "memory")
    if 5 < step < 35:
        longest = max(longest, time.monotonic() - began)
    if step == 5:
        checkpointer.wait()
    if rank == 0 and step == 5:
        fill()
    elif rank == 0 and step == 35:
        filler.unlink()
    time.sleep(0.02)
try:
    checkpointer.wait()
    problems = ""
except InfrastructureError as error:
    problems = str(error)
dist.barrier()
if rank == 0:
    say({"problems": problems, "stored": storage.steps(open_store(directory))})
say({"rank": rank, "longest": longest})
checkpointer.close()
dist.destroy_process_group()
