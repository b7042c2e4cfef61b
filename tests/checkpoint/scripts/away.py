"""One of two ranks loads what both have stored; rank 1 cannot read its own part of the newer step."""

import errno
import io
import os
import sys

import torch
import torch.distributed as dist

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.storage.stores import StorageAwayError

directory, meeting, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
checkpointer = Checkpointer(directory, linger=0.0)
opened = io.open


def open_or_fail(file, *args, **kwargs):
    if str(file).endswith("step-2/__1_0.distcp"):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
    return opened(file, *args, **kwargs)


if rank == 1:
    io.open = open_or_fail
try:
    checkpointer.load({"w": torch.zeros(1000)})
except StorageAwayError as error:
    sys.stdout.write(f"rank {rank}: {error}\n")
checkpointer.close()
dist.destroy_process_group()
