"""One rank of two that saves step 1 again and again: ``again.py RANK PLAN``.

The plan is JSON: ``verb``, ``directory``, ``meet``, and ``saves``: how many each rank makes. All hold the number of
the save. The last rank then dies; the others say what `wait` says.
"""

import json
import os
import subprocess
import sys

import torch
import torch.distributed as dist

from dlrover.checkpoint import Checkpointer
from dlrover.errors import InfrastructureError

rank, plan = int(sys.argv[1]), json.loads(sys.argv[2])
size = len(plan["saves"])
dist.init_process_group("gloo", init_method=plan["meet"], rank=rank, world_size=size)
checkpointer = Checkpointer(plan["directory"], linger=1.0)
state = {"w": torch.zeros(100_000), "rank": rank}
if plan["verb"] == "load":
    record = checkpointer.load(state)
    print(f"{record.source}: save {int(state['w'][0])}")  # noqa: T201
    checkpointer.close()
    dist.destroy_process_group()
    sys.exit()
for number in range(1, plan["saves"][rank] + 1):
    state["w"].fill_(number)
    checkpointer.save(1, state, to="storage")
if plan["verb"] == "die" and rank == size - 1:
    subprocess.run(["kill", "-KILL", str(os.getpid())], check=True)
try:
    checkpointer.wait()
    print("stored")  # noqa: T201
except InfrastructureError as error:
    print(error)  # noqa: T201
checkpointer.close()
os._exit(0)  # the others may be dead
