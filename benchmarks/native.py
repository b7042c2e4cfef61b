"""What copies and hashes of many pieces of memory cost beside one plain copy of as many bytes in the same run.

The plain copy is one ``memmove`` between the same two buffers. Sources lie in random order, as the tensors of a program do;
destinations are packed, each at a multiple of 64, as in a checkpoint's memory. All pages are touched before.
``benchmarks/README.md`` explains every figure.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dlrover._native.kernels import Kernels, kernels

MIB = 1 << 20
ROUNDS = 9
TWIN_ROUNDS = 3


def sizes_of(total: int, pieces: int) -> list[int]:
    """Sizes with a long tail, multiples of 4 that sum up to ``total``."""
    chance = random.Random(pieces)
    drawn = [chance.lognormvariate(0, 1.0) for _ in range(pieces)]
    scale = total / sum(drawn)
    return [max(4, int(scale * share) // 4 * 4) for share in drawn]


STATES = {
    "512 MiB in 592 pieces": sizes_of(512 * MIB, 592),
    "512 MiB in 20,000 pieces": sizes_of(512 * MIB, 20_000),
    "20,000 pieces of 256 B": [256] * 20_000,
    "200,000 pieces of 256 B": [256] * 200_000,
}


def memory(size: int) -> np.ndarray:
    """Touched shared memory, as that of a checkpoint."""
    array = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    array[:] = 1
    return array


def lists_of(sizes: list[int]) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """Sources, destinations and sizes, and the buffers that they lie in."""
    spaces = np.array([-(-size // 64) * 64 for size in sizes], np.uint64)
    ends = np.cumsum(spaces)
    order = np.random.default_rng(0).permutation(len(sizes))
    source = np.empty(len(sizes), np.uint64)
    source[order] = np.cumsum(spaces[order]) - spaces[order]
    buffers = memory(int(ends[-1])), memory(int(ends[-1]))
    buffers[0][:] = np.random.default_rng(1).integers(0, 256, len(buffers[0]), np.uint8)
    start = [np.uint64(buffer.ctypes.data) for buffer in buffers]
    return source + start[0], ends - spaces + start[1], np.array(sizes, np.uint64), buffers


def seconds(action: Callable[[], object]) -> float:
    """How long the action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def actions_of(
    run: Kernels, lists: tuple[Any, Any, Any], threads: int
) -> dict[str, Callable[[], object]]:
    """Each function on these lists."""
    source, destination, sizes = lists
    return {
        "copy": lambda: run.copy(source, destination, sizes, threads),
        "hash": lambda: run.hash(source, sizes, threads),
        "copy_hash": lambda: run.copy_hash(source, destination, sizes, threads),
    }


def measure(sizes: list[int]) -> dict[str, Any]:
    """Milliseconds of the plain copy, and the ratios of everything else to it."""
    *lists, (one, other) = lists_of(sizes)
    total = sum(sizes)
    actions = {"plain copy": lambda: ctypes.memmove(other.ctypes.data, one.ctypes.data, total)}
    native, twin = kernels("require"), kernels("off")
    for threads in (1, 2):
        for name, action in actions_of(native, tuple(lists), threads).items():
            actions[f"{name}, {threads} thread{'s' if threads > 1 else ''}"] = action
    for name, action in actions_of(twin, tuple(lists), 1).items():
        actions[f"{name}, Python"] = action
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(ROUNDS):
        for name, action in actions.items():
            if turn < TWIN_ROUNDS or not name.endswith("Python"):
                taken[name].append(seconds(action))
    plain = statistics.median(taken["plain copy"])
    return {
        "plain copy, ms": round(1000 * plain, 3),
        **{
            name: round(statistics.median(times) / plain, 2)
            for name, times in taken.items()
            if name != "plain copy"
        },
    }


def main() -> None:
    """Measure all states and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "machine": platform.platform(),
        "python": sys.version.split()[0],
        "library": kernels("require").reason,
        "load before": os.getloadavg()[0],
    }
    for name, sizes in STATES.items():
        figures[name] = found = measure(sizes)
        print(f"{name}: plain copy {found['plain copy, ms']} ms; ratios to it:")
        for action, ratio in found.items():
            if action != "plain copy, ms":
                print(f"  {action:<22}{ratio:>7.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
