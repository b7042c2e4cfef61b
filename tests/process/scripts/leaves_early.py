"""Rank 0 has one batch less than the others, and leaves without an error while they still call collectives.

Its process ends only when the launcher ends it, after the others have failed.
"""

import atexit
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(3 if dist.get_rank() else 2):
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
atexit.register(signal.pause)
