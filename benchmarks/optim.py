"""Optimizers of ``dlrover.optim`` as programs use them, and Local SGD beside synchronous training with stragglers.

The first part times whole steps of optimizers on the model of ``optimizers.py``, beside PyTorch's fused AdamW in the
same rounds. The second trains on four replicas whose steps sometimes take longer, by clocks that each replica
advances itself: all forms of training meet the same delays. ``benchmarks/README.md`` explains every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
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

PARTS = ("steps", "stragglers")
OPTIONS = {"betas": (0.9, 0.999), "weight_decay": 0.01}
REPLICAS, INTERVAL, EXCHANGE, END = 4, 128, 0.25, 1000.0
"""Replicas; steps between two syncs; what an exchange takes and how long the replicas train, in steps without delay."""
DELAYS: dict[str, Callable[[random.Random, int], float]] = {
    "10 % of all steps take 5 times as long": lambda chance, _: 5 if chance.random() < 0.1 else 1,
    "10 % of all steps take 11 times as long": lambda chance, _: 11 if chance.random() < 0.1 else 1,
    "one replica is 10 % slower": lambda _, rank: 1.1 if rank == 0 else 1,
    "one replica is 5 times as slow": lambda _, rank: 5 if rank == 0 else 1,
}
"""By name: how many times as long a step of a replica takes."""
FORMS: dict[str, Callable[[Any, Any], Any] | None] = {
    "no exchange at all (limit)": None,
    "synchronous (gradients in each step)": lambda inner, clock: DiLoCo(
        inner, clock.exchange, interval=1, warmup=10**9
    ),
    "DiLoCo": lambda inner, clock: DiLoCo(inner, clock.exchange, interval=INTERVAL),
    "Streaming DiLoCo": lambda inner, clock: DiLoCo(
        inner, clock.exchange, interval=INTERVAL, fragments=4, delay=4, alpha=0.5, bits=8
    ),
    "EDiT": lambda inner, clock: EDiT(inner, clock.exchange, interval=INTERVAL),
    "A-EDiT": lambda inner, clock: AEDiT(
        inner, clock.exchange, seconds=float(INTERVAL), clock=lambda: clock.now
    ),
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


class Clock:
    """A replica's own time, in steps without delay: nobody sleeps, so the machine's load does not matter."""

    def __init__(self, rank: int, delay: str, exchange: float) -> None:
        self.now = self._ready = 0.0
        chance = random.Random(rank)
        self._slower = lambda: DELAYS[delay](chance, rank)
        self._exchange = exchange
        self.latest = 0.0
        """Time of the replica that was last at the latest exchange; the same in all replicas."""

    def step(self) -> None:
        """Compute."""
        self.now += self._slower()

    def exchange(self) -> Any:
        """Begin an exchange, which ends a while after the last replica has begun it; the process group."""
        times = [torch.zeros(1, dtype=torch.float64) for _ in range(REPLICAS)]
        dist.all_gather(times, torch.tensor([self.now], dtype=torch.float64))
        self.latest = max(float(each) for each in times)
        self._ready = self.latest + self._exchange
        return dist.group.WORLD

    def await_exchange(self) -> None:
        """Wait for its end."""
        self.now = max(self.now, self._ready)


def train(rank: int, directory: str, form: str, delay: str, end: float) -> None:
    """Train up to a time; write the number of steps and the time."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", REPLICAS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=REPLICAS)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    synchronous = form.startswith("synchronous")
    clock = Clock(rank, delay, 0.0 if synchronous else EXCHANGE)
    make = FORMS[form]
    optimizer = inner if make is None else make(inner, clock)
    for value in model.parameters():
        value.grad = torch.full_like(value, 1e-3)
    steps = syncs = 0
    while (clock.now if make is None else clock.latest) < end:
        clock.step()
        optimizer.step()
        steps += 1
        if synchronous or (make is not None and optimizer.syncs > syncs):
            clock.await_exchange()
            syncs = optimizer.syncs
    Path(directory, f"{rank}.json").write_text(json.dumps([steps, clock.now]))
    dist.destroy_process_group()


def measure_stragglers(end: float) -> dict[str, dict[str, float]]:
    """Steps of all replicas per time, of each form with each kind of delay, as a part of those without any delay."""
    found: dict[str, dict[str, float]] = {}
    for delay in DELAYS:
        found[delay] = {}
        print(f"{delay}:")
        for form in FORMS:
            with tempfile.TemporaryDirectory() as directory:
                torch.multiprocessing.start_processes(
                    train, (directory, form, delay, end), nprocs=REPLICAS, start_method="fork"
                )
                results = [
                    json.loads(Path(directory, f"{rank}.json").read_text())
                    for rank in range(REPLICAS)
                ]
            rate = sum(steps / time for steps, time in results)
            found[delay][form] = round(rate / REPLICAS, 3)
            print(f"  {form:<40}{found[delay][form]:>7.3f}", flush=True)
    return found


def main() -> None:
    """Measure; print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--end", type=float, default=END, help="steps that each replica has time for"
    )
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "machine": platform.platform(),
        "torch": torch.__version__,
        "load before": os.getloadavg()[0],
    }
    if "steps" in arguments.parts:
        for threads in (1, 2):
            figures[f"steps, {threads} thread(s)"] = measure_steps(threads, arguments.rounds)
    if "stragglers" in arguments.parts:
        figures["end"], figures["stragglers"] = arguments.end, measure_stragglers(arguments.end)
    figures["load after"] = os.getloadavg()[0]
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
