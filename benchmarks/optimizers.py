"""What an optimizer's step costs beside PyTorch's fused AdamW in the same run.

The model has 40 million parameters in 148 tensors, as a language model of 12 layers. All contenders take turns, one
step each. ``benchmarks/README.md`` explains every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrover._native.updates import (
    Tensors,
    Updates,
    adagrad_scalars,
    adamw_scalars,
    agd_scalars,
    updates,
)

ROUNDS = 15
WIDTH = 384
SHAPES = [
    (50_257, WIDTH), (1024, WIDTH),
    *[(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,),
      (WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,)] * 12,
    (WIDTH,), (WIDTH,),
]  # fmt: skip
BETAS, LR, DECAY = (0.9, 0.999), 1e-4, 0.01
ROWS, ROW_WIDTH, TABLE = 200_000, 64, 1_000_000
PEER = "torch AdamW, fused"


def tensors_of(kind: torch.dtype) -> list[torch.Tensor]:
    """Parameters, or what looks like them."""
    return [torch.randn(shape).to(kind) for shape in SHAPES]


def at(tensors: list[torch.Tensor]) -> Any:
    """Their addresses."""
    return np.array([each.data_ptr() for each in tensors], np.uint64)


def torch_step(kind: type[torch.optim.Optimizer], dtype: torch.dtype, **options: Any) -> Callable:
    """A step of one of PyTorch's optimizers."""
    parameters = [torch.nn.Parameter(each) for each in tensors_of(dtype)]
    for each in parameters:
        each.grad = torch.randn(each.shape).to(dtype)
    return kind(parameters, lr=LR, **options).step


def our_step(run: Updates, rule: str, dtype: torch.dtype, threads: int) -> Callable[[], None]:
    """A step of one of ours, with all that its caller does each time: scalars, a seed."""
    parameters, gradients = tensors_of(dtype), tensors_of(dtype)
    states = [
        [torch.zeros(shape) for shape in SHAPES] for _ in range(1 if rule == "adagrad" else 2)
    ]
    sizes = np.array([each.numel() for each in parameters], np.uint64)
    count = [0]

    def step() -> None:
        count[0] += 1
        scalars = {
            "adamw": lambda: adamw_scalars(count[0], LR, BETAS, 1e-8, DECAY),
            "agd": lambda: agd_scalars(count[0], LR, BETAS, 1e-5, DECAY),
            "adagrad": lambda: adagrad_scalars(LR, 1e-10),
        }[rule]()
        tensors = Tensors(
            at(parameters), at(gradients), tuple(at(state) for state in states), sizes,
            half=dtype == torch.bfloat16,
        )  # fmt: skip
        getattr(run, rule)(tensors, scalars, seed=count[0], threads=threads)

    return step


def agd_of_torch_operations() -> Callable[[], None]:
    """AGD tensor by tensor, as a program without a fused update has it."""
    parameters, gradients = tensors_of(torch.float32), tensors_of(torch.float32)
    means, squares = ([torch.zeros(shape) for shape in SHAPES] for _ in range(2))
    count = [0]

    def step() -> None:
        count[0] += 1
        now, last = 1 - BETAS[0] ** count[0], 1 - BETAS[0] ** (count[0] - 1)
        second = 1 - BETAS[1] ** count[0]
        for p, g, m, b in zip(parameters, gradients, means, squares, strict=True):
            old = m.clone()
            m.lerp_(g, 1 - BETAS[0])
            change = m / now - (old / last if count[0] > 1 else 0)
            b.mul_(BETAS[1]).addcmul_(change, change, value=1 - BETAS[1])
            p.mul_(1 - LR * DECAY)
            root = b.sqrt().clamp_(min=1e-5 * second**0.5)
            p.addcdiv_(m, root, value=-LR * second**0.5 / now)

    return step


def copy_of_the_parameters() -> Callable[[], object]:
    """One plain copy of as many bytes as the parameters have."""
    one, other = torch.randn(parameters()), torch.randn(parameters())
    return lambda: other.copy_(one)


def parameters() -> int:
    """How many the model has."""
    return sum(int(np.prod(shape)) for shape in SHAPES)


def rows_step(run: Updates, threads: int) -> Callable[[], None]:
    """A sparse step: some rows of a table."""
    table, squares = torch.randn(TABLE, ROW_WIDTH), torch.zeros(TABLE, ROW_WIDTH)
    gradients = torch.randn(ROWS, ROW_WIDTH)
    rows = np.random.default_rng(0).permutation(TABLE)[:ROWS].astype(np.uint64)
    sizes, width = np.full(ROWS, ROW_WIDTH, np.uint64), np.uint64(4 * ROW_WIDTH)
    scalars = adagrad_scalars(LR, 1e-10)

    def step() -> None:
        lists = [rows * width + np.uint64(each.data_ptr()) for each in (table, squares)]
        gradient = np.arange(ROWS, dtype=np.uint64) * width + np.uint64(gradients.data_ptr())
        run.adagrad(Tensors(lists[0], gradient, (lists[1],), sizes), scalars, threads=threads)

    return step


def rows_of_torch() -> Callable[[], object]:
    """The same by PyTorch, with a sparse gradient."""
    table = torch.nn.Parameter(torch.randn(TABLE, ROW_WIDTH))
    rows = torch.from_numpy(np.random.default_rng(0).permutation(TABLE)[:ROWS].copy())
    table.grad = torch.sparse_coo_tensor(
        rows[None], torch.randn(ROWS, ROW_WIDTH), table.shape, check_invariants=True
    )
    return torch.optim.Adagrad([table], lr=LR).step


def take_turns(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median seconds of each."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            if turn:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in taken.items()}


def show(title: str, taken: dict[str, float], peer: str) -> dict[str, float]:
    """Print the times and their ratios to the peer's; return both."""
    print(f"{title}: {peer} {1e3 * taken[peer]:.1f} ms; ratios to it:")
    ratios = {name: round(seconds / taken[peer], 2) for name, seconds in taken.items()}
    for name, ratio in ratios.items():
        print(f"  {name:<28}{ratio:>7.2f}")
    return {f"{peer}, ms": round(1e3 * taken[peer], 2), **ratios}


def main() -> None:
    """Measure with one thread and with two; print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    native, twin = updates("require"), updates("off")
    figures: dict[str, Any] = {
        "machine": platform.platform(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "parameters": parameters(),
        "load before": os.getloadavg()[0],
    }
    options = {"betas": BETAS, "weight_decay": DECAY}
    single, half = torch.float32, torch.bfloat16
    for threads in (1, 2):
        torch.set_num_threads(threads)
        actions: dict[str, Callable[[], object]] = {
            PEER: torch_step(torch.optim.AdamW, single, fused=True, **options),
            "copy of the parameters": copy_of_the_parameters(),
            "torch Adagrad, fused": torch_step(torch.optim.Adagrad, single, fused=True),
            "torch AdamW, for-loop": torch_step(
                torch.optim.AdamW, single, foreach=False, **options
            ),
            "AGD of torch operations": agd_of_torch_operations(),
        }
        for rule in ("adamw", "agd", "adagrad"):
            actions[f"{rule}"] = our_step(native, rule, single, threads)
        found = take_turns(actions, arguments.rounds)
        figures[f"float32, {threads} thread(s)"] = show(
            f"float32, {threads} thread(s)", found, PEER
        )
        actions = {PEER: torch_step(torch.optim.AdamW, half, fused=True, **options)}
        for rule in ("adamw", "agd"):
            actions[f"{rule}, random rounding"] = our_step(native, rule, half, threads)
        found = take_turns(actions, arguments.rounds)
        figures[f"bfloat16, {threads} thread(s)"] = show(
            f"bfloat16, {threads} thread(s)", found, PEER
        )
        actions = {"torch": rows_of_torch(), "adagrad": rows_step(native, threads)}
        found = take_turns(actions, arguments.rounds)
        title = f"sparse Adagrad, {ROWS:,} of {TABLE:,} rows of {ROW_WIDTH}, {threads} thread(s)"
        figures[title] = show(title, found, "torch")
        print(f"  {ROWS / found['adagrad'] / 1e6:.1f} million rows a second")
    actions = {PEER: torch_step(torch.optim.AdamW, single, fused=True, **options)}
    for rule in ("adamw", "agd"):
        actions[f"{rule}, Python"] = our_step(twin, rule, single, 1)
    figures["without the compiled library"] = show(
        "without the compiled library", take_turns(actions, 2), PEER
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
