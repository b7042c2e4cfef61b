"""Trains, saves and loads under different strategies: ``checkpoints.py DIRECTORY JSON``.

The argument is a list of ``[verb, model, fields of the strategy]``. ``save`` trains for 3 steps and stores; ``load``
makes the model anew, with other values, loads, and trains for 2 more steps. The losses are those of one process that trained for 5.
"""

import json
import sys

import torch
import torch.distributed as dist
from models import problem

from dlrover.accelerate import Strategy, auto_accelerate
from dlrover.accelerate.microbatch import call, loss_of_output
from dlrover.checkpoint import Checkpointer

BATCH, SAVED, LAST = 4, 3, 5
OPTIONS = {"lr": 1e-2, "eps": 1e-4}


def batches(given):
    return [
        torch.utils.data.default_collate(given.data[step * BATCH : (step + 1) * BATCH])
        for step in range(LAST)
    ]


def alone(name):
    given = problem(name, BATCH * LAST)
    optimizer, losses = torch.optim.AdamW(given.model.parameters(), **OPTIONS), []
    for data in batches(given):
        loss = (given.loss or loss_of_output)(data, call(given.model, data, given.form))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mine(data, rank, ranks):
    return torch.utils._pytree.tree_map(lambda leaf: leaf[rank::ranks], data)


def train(given, result, steps):
    losses, place = [], result.args["data_parallel"]
    for data in batches(given)[steps]:
        part = mine(data, *place)
        loss = result.loss_func(part, call(result.model, part, given.form))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
    return losses


torch.set_num_threads(1)
directory, cases = sys.argv[1], json.loads(sys.argv[2])
checkpointer = None
for verb, name, fields in cases:
    given = problem(name, BATCH * LAST)
    if verb == "load":
        with torch.no_grad():
            for parameter in given.model.parameters():
                parameter.add_(1.0)
    strategy = Strategy(**{"precision": "fp32", "micro_batch": BATCH, **fields})
    _, result, _ = auto_accelerate(
        given.model, torch.optim.AdamW, loss_func=given.loss, model_input_format=given.form, optim_args=OPTIONS,
        batch_size=BATCH, load_strategy=strategy,
    )  # fmt: skip
    state = {"training": result.args["state"], "step": 0}
    if checkpointer is None:
        checkpointer = Checkpointer(directory, linger=60.0)
    if verb == "save":
        losses = train(given, result, slice(SAVED))
        state["step"] = SAVED
        checkpointer.save(SAVED, state, to="storage")
        checkpointer.wait()
        wanted = alone(name)[:SAVED]
    else:
        record = checkpointer.load(state)
        assert record is not None
        assert state["step"] == SAVED == record.step
        losses = train(given, result, slice(SAVED, LAST))
        wanted = alone(name)[SAVED:]
    worst = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))
    assert worst < 2e-6, (verb, name, fields, losses, wanted)
    print("EQUAL", verb, name, fields, flush=True)  # noqa: T201
checkpointer.close()
if dist.is_initialized():
    dist.destroy_process_group()
