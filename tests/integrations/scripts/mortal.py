"""What the scripts share: a rank that dies once, and one line for each loss."""

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def die_once(directory: Path) -> None:
    """End the last rank, unless this was done before; all ranks have saved the step before."""
    marker = directory / "died"
    if marker.exists():
        return
    if dist.is_initialized():
        dist.barrier()
    if RANK == RANKS - 1:
        marker.touch()
        subprocess.run(["kill", "-KILL", str(os.getpid())], check=True)


def tell(line: str) -> None:
    """Print a line in one piece: the ranks share the output."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())
