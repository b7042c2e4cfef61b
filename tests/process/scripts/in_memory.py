"""A state that is spread over the ranks, saved to memory only: ``in_memory.py OUT REPLICAS STEPS``.

Each rank writes ``OUT/from-ROUND-RANK``: the step that it began at, and where that came from. With 0 steps it
saves once and waits for the file ``OUT/go``.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlrover.checkpoint import Checkpointer, Shard


def main(out: Path, replicas: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {"w": Shard(torch.full((2,), float(rank)), (4,), (2 * rank,)), "step": 0}
    checkpointer = Checkpointer(out / "checkpoints", replicas=replicas)
    record = checkpointer.load(state)
    began = f"{state['step']} {record.source if record else 'nowhere'}"
    (out / f"from-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}").write_text(began)
    for step in range(state["step"] + 1, steps + 1):
        state["step"] = step
        checkpointer.save(step, state, to="memory")
        dist.barrier()
        (out / f"step-{rank}").write_text(str(step))
        time.sleep(0.1)
    while not steps and not (out / "go").exists():
        time.sleep(0.05)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
