"""What a memory checkpoint costs: saves, loads and persists, as ratios to a plain copy in the same run.

The limit is a copy of the same bytes by one thread into memory that was touched before; it is measured
between the other measurements. ``benchmarks/README.md`` explains every figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dlrover.checkpoint import Checkpointer

Row = dict[str, Any]
State = dict[str, torch.Tensor]


def transformer_state(gigabytes: float) -> State:
    """Parameters and Adam's moments: 4 large matrices and 4 vectors per layer, three times."""
    width = 1024
    layers = max(1, round(gigabytes * 1e9 / (3 * 4 * 12 * width * width)))
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    shapes += [(width,)] * 4
    return {
        f"{kind}.{layer}.{number}": torch.randn(shape)
        for kind in ("param", "exp_avg", "exp_avg_sq")
        for layer in range(layers)
        for number, shape in enumerate(shapes)
    }


def small_state(gigabytes: float, tensors: int) -> State:
    """The same bytes in many equal tensors."""
    size = round(gigabytes * 1e9 / 4 / tensors)
    return {f"tensor.{number}": torch.randn(size) for number in range(tensors)}


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Limit:
    """The plain copy, measured again and again between other things."""

    def __init__(self, nbytes: int) -> None:
        self._source = torch.ones(nbytes, dtype=torch.uint8)
        self._target = torch.zeros(nbytes, dtype=torch.uint8)
        self._target.copy_(self._source)
        self._times: list[float] = []

    def measure(self) -> float:
        """Copy once."""
        self._times.append(seconds(lambda: self._target.copy_(self._source)))
        return self._times[-1]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self._times)


def raw_write(path: Path, nbytes: int) -> float:
    """Seconds to write so many bytes to a file and make them durable."""
    block = memoryview(bytes(os.urandom(1 << 20)) * 64)
    with path.open("wb", buffering=0) as file:
        began = time.perf_counter()
        for start in range(0, nbytes, len(block)):
            file.write(block[: nbytes - start])
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    path.unlink()
    return took


def measure_ours(state: State, limit: Limit, directory: Path, repeats: int) -> Iterator[Row]:
    """Save and load through memory, and to storage."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    checkpointer = Checkpointer(directory, keep=1, linger=0.0)
    checkpointer.load(state)
    time.sleep(3.0 + nbytes / 1e9)  # the first step of a training takes longer than this
    steps = iter(range(1, 10_000))
    before = limit.measure()
    first = seconds(lambda: checkpointer.save(next(steps), state))
    yield {"what": "save to memory, first", "seconds": first, "ratio": first / before}
    checkpointer.save(next(steps), state)
    for name, call in (
        ("save to memory", lambda: checkpointer.save(next(steps), state)),
        ("load from memory", lambda: checkpointer.load(state)),
    ):
        times, ratios = [], []
        for _ in range(repeats):
            checkpointer.save(next(steps), state)
            time.sleep(0.3)  # until the saver has computed the checksums
            copy = limit.measure()
            took = seconds(call)
            times.append(took)
            ratios.append(took / ((copy + limit.measure()) / 2))
        yield {
            "what": name,
            "seconds": statistics.median(times),
            "ratio": statistics.median(ratios),
        }
    durable, rates = [], []
    for _ in range(max(2, repeats // 3)):
        raw = raw_write(directory / "raw", nbytes)
        began = time.perf_counter()
        checkpointer.save(next(steps), state, to="storage")
        checkpointer.wait()
        durable.append(time.perf_counter() - began)
        rates.append(raw / durable[-1])
    median = statistics.median(durable)
    yield {
        "what": "save to storage, until durable",
        "seconds": median,
        "ratio": median / limit.median,
        "of_raw_write_rate": statistics.median(rates),
    }
    checkpointer.close()


def measure_peers(state: State, limit: Limit, directory: Path, repeats: int) -> Iterator[Row]:
    """What torch offers."""
    file, folder = directory / "torch.pt", directory / "dcp"

    def async_save() -> None:
        running.append(dcp.async_save(state, checkpoint_id=folder))

    running: list[Any] = []
    peers: list[tuple[str, Callable[[], object]]] = [
        ("torch.save", lambda: torch.save(state, file)),
        ("DCP save", lambda: dcp.save(state, checkpoint_id=folder)),
        ("DCP async_save (thread), blocked", async_save),
    ]
    for name, call in peers:
        times, ratios = [], []
        for _ in range(repeats):
            copy = limit.measure()
            took = seconds(call)
            while running:
                running.pop().result()
            times.append(took)
            ratios.append(took / ((copy + limit.measure()) / 2))
        yield {
            "what": name,
            "seconds": statistics.median(times),
            "ratio": statistics.median(ratios),
        }


@contextlib.contextmanager
def world_of_one(directory: Path) -> Iterator[None]:
    """DCP's ``async_save`` needs a process group."""
    store = dist.FileStore(str(directory / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--small-tensors", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results/checkpoint.json"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "machine": {
            "cpu": platform.processor(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        },
        "states": {},
    }
    for name, make in (
        ("transformer", lambda: transformer_state(args.gigabytes)),
        ("small", lambda: small_state(args.gigabytes, args.small_tensors)),
    ):
        directory = Path(tempfile.mkdtemp(dir=args.directory))
        try:
            state = make()
            nbytes = sum(tensor.nbytes for tensor in state.values())
            limit = Limit(nbytes)
            with world_of_one(directory):
                rows = list(measure_ours(state, limit, directory / "ours", args.repeats))
                rows += measure_peers(state, limit, directory, max(2, args.repeats // 3))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        load = os.getloadavg()[0]
        print(f"{name}: {nbytes / 1e9:.2f} GB in {len(state)} tensors; load {load:.1f}")
        print(f"| plain copy | {limit.median * 1e3:.1f} ms | 1 |")
        for row in rows:
            raw = f" ({row['of_raw_write_rate']:.2f} of raw writes)" if len(row) > 3 else ""
            print(f"| {row['what']} | {row['seconds'] * 1e3:.1f} ms | {row['ratio']:.2f}{raw} |")
        results["states"][name] = {
            "bytes": nbytes, "tensors": len(state), "limit_seconds": limit.median, "load": load, "rows": rows,
        }  # fmt: skip
    args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
