"""Optimizers of ``dlrover.optim`` as programs use them, and Local SGD beside synchronous training with stragglers.

The first part times whole steps of optimizers on the model of ``optimizers.py``, beside PyTorch's fused AdamW in the
same rounds. The second trains on four replicas whose steps sometimes take longer: all forms of training meet the same
delays. ``benchmarks/README.md`` explains every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from optimizers import PEER, SHAPES, parameters, show, take_turns, tensors_of, torch_step
from torch import nn

from dlrover.optim import AGD, WSAM, AdamW8bit, AEDiT, AGD8bit, DiLoCo, EDiT, GroupAdam

OPTIONS = {"betas": (0.9, 0.999), "weight_decay": 0.01}
REPLICAS, STEP, SECONDS, INTERVAL = 4, 0.02, 20.0, 32
"""Replicas; seconds of a step without delay; of a measurement; steps between two syncs."""
DELAYS = {
    "10 % of all steps take 5 times as long": lambda chance, rank: (
        5 if chance.random() < 0.1 else 1
    ),
    "10 % of all steps take 11 times as long": lambda chance, rank: (
        11 if chance.random() < 0.1 else 1
    ),
    "one replica is 10 % slower": lambda chance, rank: 1.1 if rank == 0 else 1,
    "one replica is 5 times as slow": lambda chance, rank: 5 if rank == 0 else 1,
}
"""By name: how many times as long a step of a replica takes."""
FORMS: dict[str, Callable[[Any], Any] | None] = {
    "no exchange at all (limit)": None,
    "synchronous (gradients in each step)": lambda inner: DiLoCo(inner, interval=1, warmup=10**9),
    "DiLoCo": lambda inner: DiLoCo(inner, interval=INTERVAL),
    "Streaming DiLoCo, 8 bits": lambda inner: DiLoCo(
        inner, interval=INTERVAL, fragments=4, delay=4, alpha=0.5, bits=8
    ),
    "EDiT": lambda inner: EDiT(inner, interval=INTERVAL),
    "A-EDiT": lambda inner: AEDiT(inner, seconds=INTERVAL * STEP),
}


# ---- steps


def step_of(make: Callable[[list[nn.Parameter]], Any]) -> Callable[[], object]:
    """A step of an optimizer of ours."""
    values = [nn.Parameter(each) for each in tensors_of(torch.float32)]
    for each in values:
        each.grad = torch.randn(each.shape)
    optimizer = make(values)
    if isinstance(optimizer, WSAM):
        return lambda: optimizer.step(lambda: None)
    return optimizer.step


@contextmanager
def without_library() -> Iterator[None]:
    """Optimizers that are made here use PyTorch's operations."""
    before = os.environ.get("DLROVER_NATIVE")
    os.environ["DLROVER_NATIVE"] = "off"
    yield
    os.environ.pop("DLROVER_NATIVE")
    if before is not None:
        os.environ["DLROVER_NATIVE"] = before


def measure_steps(threads: int, rounds: int) -> dict[str, float]:
    """Time all optimizers in turns."""
    torch.set_num_threads(threads)
    actions: dict[str, Callable[[], object]] = {
        PEER: torch_step(torch.optim.AdamW, torch.float32, fused=True, **OPTIONS),
        "torch AdamW, foreach": torch_step(torch.optim.AdamW, torch.float32, foreach=True, **OPTIONS),
        "AGD": step_of(lambda values: AGD(values, lr=1e-4, **OPTIONS)),
        "AGD8bit": step_of(lambda values: AGD8bit(values, lr=1e-4, **OPTIONS)),
        "AdamW8bit": step_of(lambda values: AdamW8bit(values, lr=1e-4, **OPTIONS)),
        "GroupAdam": step_of(lambda values: GroupAdam(values, lr=1e-4, l21=1e-5)),
        "WSAM around AGD, without the two passes": step_of(
            lambda values: WSAM(nn.ParameterList(values), AGD(values, lr=1e-4, **OPTIONS))
        ),
    }  # fmt: skip
    with without_library():
        actions["AGD without the compiled library"] = step_of(
            lambda values: AGD(values, lr=1e-4, **OPTIONS)
        )
    title = f"{len(SHAPES)} tensors, {parameters():,} parameters, {threads} thread(s)"
    return show(title, take_turns(actions, rounds), PEER)


# ---- stragglers


def network() -> nn.Module:
    """A model of a million parameters: its exchange takes time, its computation is replaced by a pause."""
    torch.manual_seed(0)
    return nn.Linear(1024, 1024)


def train(rank: int, directory: str, form: str, delay: str, seconds: float) -> None:
    """Train for some time; write the number of steps."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", REPLICAS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=REPLICAS)
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    make, slower = FORMS[form], DELAYS[delay]
    optimizer = inner if make is None else make(inner)
    for value in model.parameters():
        value.grad = torch.full_like(value, 1e-3)
    stop = torch.zeros(1)
    chance, steps = random.Random(rank), 0
    dist.barrier()
    began = time.perf_counter()
    done = 0
    while not stop:
        time.sleep(STEP * slower(chance, rank))
        optimizer.step()
        steps += 1
        # All end together: after a sync, or at once where there is none.
        late = time.perf_counter() - began > seconds
        if make is None:
            stop.fill_(late)
        elif optimizer.syncs > done or (form.startswith("sync") and steps % 10 == 0):
            done = optimizer.syncs
            stop.fill_(late)
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    taken = time.perf_counter() - began
    Path(directory, f"{rank}.json").write_text(json.dumps([steps, taken]))
    dist.destroy_process_group()


def measure_stragglers(seconds: float) -> dict[str, dict[str, float]]:
    """Steps of all replicas per second, of each form with each kind of delay, as a part of those without any delay."""
    found: dict[str, dict[str, float]] = {}
    for delay in DELAYS:
        found[delay] = {}
        print(f"{delay}:")
        for form in FORMS:
            with tempfile.TemporaryDirectory() as directory:
                torch.multiprocessing.spawn(
                    train, (directory, form, delay, seconds), nprocs=REPLICAS
                )
                results = [
                    json.loads(Path(directory, f"{rank}.json").read_text())
                    for rank in range(REPLICAS)
                ]
            rate = sum(steps / taken for steps, taken in results)
            found[delay][form] = round(rate * STEP / REPLICAS, 3)
            print(f"  {form:<40}{found[delay][form]:>7.3f}", flush=True)
    return found


def main() -> None:
    """Measure; print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "machine": platform.platform(),
        "torch": torch.__version__,
        "load before": os.getloadavg()[0],
    }
    for threads in (1, 2):
        figures[f"steps, {threads} thread(s)"] = measure_steps(threads, arguments.rounds)
    figures["stragglers"] = measure_stragglers(arguments.seconds)
    figures["load after"] = os.getloadavg()[0]
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
