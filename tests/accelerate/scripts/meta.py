"""Trains models that begin on the meta device, under strategies: ``meta.py JSON`` prints losses and sizes.

The weights of a model follow from the seed and its names alone, so all strategies begin with the same ones.
"""

import json
import os
import sys

import models
import torch
import torch.distributed as dist

from dlrover.accelerate import Strategy, auto_accelerate
from dlrover.accelerate.microbatch import call

BATCH, STEPS = 8, 4


def local_size(parameter):
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel()


torch.set_num_threads(1)
for name, fields in json.loads(sys.argv[1]):
    given = models.problem(name, BATCH * STEPS)
    with torch.device("meta"):
        model = getattr(models, name)()
    torch.manual_seed(5)
    _, result, _ = auto_accelerate(
        model, "sgd", given.data, given.loss, model_input_format=given.form, optim_args={"lr": 0.01},
        dataloader_args={"batch_size": BATCH},
        load_strategy=Strategy(**{"precision": "fp32", "micro_batch": BATCH, **fields}),
        lr_scheduler_cls=torch.optim.lr_scheduler.StepLR, lr_scheduler_args={"step_size": 1},
    )  # fmt: skip
    losses = []
    for data in [*result.dataloader, given.data[:BATCH]]:
        last = data is not None and len(losses) == STEPS
        if last:  # the same samples on all ranks, without gradients
            data = torch.utils.data.default_collate(data)  # noqa: PLW2901
        with torch.set_grad_enabled(not last):
            loss = result.loss_func(data, call(result.model, data, given.form))
        if not last:
            loss.backward()
            result.optim.step()
            result.optim.zero_grad()
            result.lr_scheduler.step()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
    size = sum(map(local_size, result.model.parameters()))
    if int(os.environ.get("RANK", "0")) == 0:
        print("RUN", json.dumps([name, fields, losses, size]), flush=True)  # noqa: T201
if dist.is_initialized():
    dist.destroy_process_group()
