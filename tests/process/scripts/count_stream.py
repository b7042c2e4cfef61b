"""Counts how often the model has learned from each message: ``count_stream.py OUT URL MESSAGES PAUSE``.

Messages are numbers. The model is one count a number; all ranks add what all of them have got at each step,
save every second step, and go on until all ``MESSAGES`` are there; the last step is stored. Rank 0 writes the
model to ``OUT/counts``.
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
from dlrover.data import Message, Stream
from dlrover.data.dataset import ElasticDataset

OUT, URL, MESSAGES, PAUSE = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
RANK, RESTART = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def number(message: Message) -> int:
    value = message.value["n"] if isinstance(message.value, dict) else message.value
    return int(value)


def main() -> None:
    dist.init_process_group("gloo")
    data = ElasticDataset(Stream(URL, decode=number, idle=0.3))
    state = {"counts": torch.zeros(MESSAGES), "step": 0, "data": data}
    with contextlib.closing(Checkpointer(OUT / "checkpoint", linger=5)) as checkpointer:
        record = checkpointer.load(state)
        (OUT / f"began-{RESTART}-{RANK}").write_text(str(record and record.source))
        loader = data.loader(8)
        batches = iter(loader)
        while state["counts"].sum() < MESSAGES:
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)  # nothing came for a moment; there will be more
            learned = torch.zeros(MESSAGES)
            if batch is not None:
                learned.index_add_(0, batch, torch.ones(len(batch)))
            dist.all_reduce(learned)
            state["counts"] += learned
            state["step"] += 1
            if state["step"] % 2 == 0:
                checkpointer.save(
                    state["step"], state, "memory" if state["step"] % 6 else "storage"
                )
            with (OUT / f"steps-{RANK}").open("a") as file:
                file.write(f"{state['step']}\n")
            time.sleep(PAUSE)
        checkpointer.save(state["step"], state, "storage")
        checkpointer.wait()
    data.close()
    if RANK == "0":
        (OUT / "counts").write_text(json.dumps(state["counts"].int().tolist()))
    dist.barrier()
    dist.destroy_process_group()


main()
