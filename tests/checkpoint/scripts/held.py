"""One rank that saves steps to memory and waits, or loads and says what: ``held.py RANK PLAN``.

The plan is JSON: ``verb``, ``nodes`` (a directory for each), ``last`` (the last step, by rank),
``options`` of the Checkpointer, and ``held``: how many ranks' last step a node must hold.
"""

import json
import signal
import sys
import time

import torch
import torch.distributed as dist

from dlrover.checkpoint import Checkpointer

rank, plan = int(sys.argv[1]), json.loads(sys.argv[2])
size = len(plan["last"])
dist.init_process_group("gloo", init_method=plan["meet"], rank=rank, world_size=size)
directory = plan["nodes"][rank * len(plan["nodes"]) // size]
checkpointer = Checkpointer(directory, **plan["options"])


def state_of(step: int) -> dict:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {"w": torch.randn(plan.get("size", 1000), generator=generator), "step": step}


def say(words: str) -> None:
    print(words, flush=True)  # noqa: T201


if plan["verb"] == "save":
    for step in range(1, plan["last"][rank] + 1):
        checkpointer.save(step, state_of(step))
    end = time.monotonic() + 30
    newest: set[int] = set()
    while len(newest) < plan["held"]:
        assert time.monotonic() < end, newest
        held = checkpointer._client.look().held
        newest = {item.rank for item in held if item.save.step == plan["last"][rank]}
        time.sleep(0.02)
    say("saved")
    signal.pause()
else:
    state = {"w": torch.zeros(plan.get("size", 1000)), "step": 0}
    record = checkpointer.load(state)
    assert record is not None
    assert state["step"] == record.step
    assert torch.equal(state["w"], state_of(record.step)["w"])
    say(f"{record.step} from {record.source}")
    checkpointer.close()
    dist.destroy_process_group()
