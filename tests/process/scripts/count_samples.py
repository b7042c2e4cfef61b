"""Counts how often the model has learned from each sample: ``count_samples.py OUT SAMPLES EPOCHS PAUSE``.

The model is one number a sample. All ranks add what all of them have got at each step, save every second
step, and go on until nobody gets any more. Rank 0 writes the model to ``OUT/counts-RANKS`` in the end.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlrover.checkpoint import Checkpointer
from dlrover.data.dataset import ElasticDataset

OUT, SAMPLES, EPOCHS, PAUSE = (
    Path(sys.argv[1]),
    int(sys.argv[2]),
    int(sys.argv[3]),
    float(sys.argv[4]),
)
RANK, RESTART = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
WORKERS = int(os.environ.get("LOADER_WORKERS", "0"))


def main() -> None:
    dist.init_process_group("gloo")
    timeout = float(os.environ.get("DATA_TIMEOUT", "1800"))
    data = ElasticDataset(
        range(SAMPLES), epochs=EPOCHS, shuffle=True, seed=7, shard=5, timeout=timeout
    )
    state = {"counts": torch.zeros(SAMPLES), "step": 0, "data": data}
    with contextlib.closing(Checkpointer(OUT / "checkpoint", linger=30)) as checkpointer:
        record = checkpointer.load(state)
        (OUT / f"began-{RESTART}-{RANK}").write_text(str(record and record.source))
        batches = (batch for _ in data.until_end() for batch in data.loader(4, num_workers=WORKERS))
        while True:
            batch = next(batches, None)
            more = torch.zeros(SAMPLES + 1)
            if batch is not None:
                more.index_add_(0, batch, torch.ones(len(batch)))
                more[SAMPLES] = 1
            dist.all_reduce(more)
            if not more[SAMPLES]:
                break
            state["counts"] += more[:SAMPLES]
            state["step"] += 1
            if state["step"] % 2 == 0:
                checkpointer.save(
                    state["step"], state, "memory" if state["step"] % 6 else "storage"
                )
            with (OUT / f"steps-{RANK}").open("a") as file:
                file.write(f"{state['step']}\n")
            time.sleep(PAUSE)
        checkpointer.wait()
    data.close()
    if RANK == "0":
        (OUT / "counts").write_text(json.dumps(state["counts"].int().tolist()))
    dist.barrier()
    dist.destroy_process_group()


main()
