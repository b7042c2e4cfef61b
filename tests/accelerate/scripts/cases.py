"""Trains models under strategies, and compares their losses with those of one process: ``cases.py JSON``.

The argument is a list of cases: model, fields of the strategy, and options. Rank 0 prints a line for each.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from models import problem
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from dlrover.accelerate import Strategy, auto_accelerate, clip_grad_norm_
from dlrover.accelerate.microbatch import call, loss_of_output

STEPS, BATCH = 10, 8
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-4}),
}


def problem_of(case):
    """The model and its data; with ``varied``, samples of different lengths, whose padding, 0, does not count."""
    given = problem(case["model"], STEPS * case.get("batch", BATCH), case.get("sequence", 16))
    if case["model"] == "positioned":
        return given, with_positions
    if not case.get("varied"):
        return given, torch.utils.data.default_collate
    given.data = [sample[: 6 + 5 * number % 11].clamp(min=1) for number, sample in enumerate(given.data)]  # fmt: skip
    given.loss = loss_of_tokens
    return given, lambda samples: pad_sequence(samples, batch_first=True)


def with_positions(samples):
    tokens = torch.stack(samples)
    return {"tokens": tokens, "positions": torch.arange(tokens.shape[1])[None]}


def loss_of_tokens(data, output):
    each = functional.cross_entropy(output[:, :-1].transpose(1, 2), data[:, 1:], reduction="none")
    real = data[:, 1:] > 0
    return ((each * real).sum(1) / real.sum(1)).mean()


def alone(case):
    """The losses of a plain loop in one process."""
    given, collate = problem_of(case)
    kind, options = OPTIMIZERS[case.get("optimizer", "sgd")]
    optimizer = kind(given.model.parameters(), **options)
    batch, losses, norms = case.get("batch", BATCH), [], []
    for step in range(STEPS):
        data = collate(given.data[step * batch : (step + 1) * batch])
        loss = (given.loss or loss_of_output)(data, call(given.model, data, given.form))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(given.model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def together(case):
    """The same under a strategy."""
    batch = case.get("batch", BATCH)
    given, collate = problem_of(case)
    kind, options = OPTIMIZERS[case.get("optimizer", "sgd")]
    strategy = case["strategy"]
    if isinstance(strategy, dict):
        strategy = Strategy(**{"precision": "fp32", "micro_batch": batch, **strategy})
    _, result, _ = auto_accelerate(
        given.model, kind, given.data, given.loss, model_input_format=given.form, optim_args=options,
        dataloader_args={"batch_size": batch, "collate_fn": collate}, load_strategy=strategy,
    )  # fmt: skip
    losses, norms = [], []
    for batch_data in result.dataloader:
        data = result.prepare_input(batch_data, result.args["device"])
        loss = result.loss_func(data, call(result.model, data, given.form))
        loss.backward()
        norms.append(float(clip_grad_norm_(result.model, 1.0)))
        result.optim.step()
        result.optim.zero_grad()
        mean = loss.detach().clone() * result.dataloader.batch_sampler.weight
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
    return losses, norms


def worst(found, wanted):
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


torch.set_num_threads(1)
known = {}
for number, case in enumerate(json.loads(sys.argv[1])):
    start = time.process_time()
    found, norms = together(case)
    if int(os.environ.get("RANK", "0")) == 0:
        key = json.dumps({**case, "strategy": None, "most": None})
        wanted, its_norms = known[key] = known.get(key) or alone(case)
        report = {
            "case": number, "seconds": round(time.process_time() - start, 2), "losses": found, "alone": wanted,
            "loss": worst(found, wanted), "norm": worst(norms, its_norms),
        }  # fmt: skip
        print("CASE", json.dumps(report), flush=True)  # noqa: T201
if dist.is_initialized():
    dist.destroy_process_group()
