"""One of two ranks, each on a node of its own, makes a `Checkpointer` in the directory that it sees."""

import sys

import torch.distributed as dist

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.engine import shared
from dlrover.errors import DLRoverError

meeting, rank, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
shared.PATIENCE = 0.5
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
try:
    Checkpointer(directory, linger=0.0).close()
    sys.stdout.write("shared\n")
except DLRoverError as error:
    sys.stdout.write(f"{type(error).__name__}: {error}\n")
dist.destroy_process_group()
