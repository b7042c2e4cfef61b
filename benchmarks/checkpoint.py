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

import checkpoint_training
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_training import Row, seconds
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dlrover.checkpoint import Checkpointer

State = dict[str, torch.Tensor]


def transformer_state(gigabytes: float) -> State:
    """GPT-2's 148 parameters, their gradients and Adam's moments; the width follows from the size."""
    layers = 12
    width = 8 * round((gigabytes * 1e9 / (4 * 4 * 12 * layers)) ** 0.5 / 8)
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(3 * width,), *[(width,)] * 6, (4 * width,)]
    shapes = [*layers * (matrices + vectors), (1024, width), (1024, width), (width,), (width,)]
    return {
        f"{kind}.{number}": torch.randn(shape)
        for kind in ("param", "grad", "exp_avg", "exp_avg_sq")
        for number, shape in enumerate(shapes)
    }


def small_state(nbytes: float, tensors: int) -> State:
    """The same bytes in many equal tensors."""
    size = round(nbytes / 4 / tensors)
    return {f"tensor.{number}": torch.randn(size) for number in range(tensors)}


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
    """What torch and safetensors offer; for asynchronous ones, how long they block."""
    file, folder = directory / "torch.pt", directory / "dcp"
    running: list[Any] = []

    def async_save(**options: Any) -> Callable[[], None]:
        return lambda: running.append(dcp.async_save(state, checkpoint_id=folder, **options))

    def experimental_save() -> None:
        running.extend(theirs.save(str(directory / "experimental"), state))

    def experimental_staged() -> None:
        experimental_save()
        running[-2].result()

    cached = BlockingAsyncStager(cache_staged_state_dict=True)
    theirs = checkpoint_training.experimental()
    process = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    peers: list[tuple[str, Callable[[], object]]] = [
        ("torch.save", lambda: torch.save(state, file)),
        ("safetensors", lambda: save_file(state, directory / "state.safetensors")),
        ("DCP save", lambda: dcp.save(state, checkpoint_id=folder)),
        ("DCP async_save (thread), blocked", async_save()),
        ("DCP async_save (cached staging), blocked", async_save(async_stager=cached)),
        ("DCP async_save (process), blocked", async_save(**process)),
        ("torch's experimental one, staging waited for", experimental_staged),
        ("torch's experimental one, not waited for", experimental_save),
    ]
    for name, call in peers:
        yield {"what": name, **_measure_peer(call, running, limit, repeats)}
    theirs.close()


def _measure_peer(
    call: Callable[[], object], running: list[Any], limit: Limit, repeats: int
) -> Row:
    times, ratios = [], []
    for number in range(repeats + 1):
        copy = limit.measure()
        try:
            took = seconds(call)
            for future in running:
                getattr(future, "upload_completion", future).result()
        except (OSError, RuntimeError) as error:
            return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}
        finally:
            running.clear()
        if number:  # the first one is slower: what is kept for later is made
            times.append(took)
            ratios.append(took / ((copy + limit.measure()) / 2))
    return {"seconds": statistics.median(times), "ratio": statistics.median(ratios)}


@contextlib.contextmanager
def world_of_one(directory: Path) -> Iterator[None]:
    """DCP's ``async_save`` needs a process group."""
    store = dist.FileStore(str(directory / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def working_directory(parent: Path | None) -> Iterator[Path]:
    """A directory that is deleted again."""
    directory = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def without_library() -> Iterator[None]:
    """Use the Python twin of the compiled library, here and in the saver."""
    before = os.environ.get("DLROVER_NATIVE")
    os.environ["DLROVER_NATIVE"] = "off"
    try:
        yield
    finally:
        del os.environ["DLROVER_NATIVE"]
        if before is not None:
            os.environ["DLROVER_NATIVE"] = before


def measure(name: str, state: State, directory: Path, repeats: int, *, peers: bool) -> Row:
    """All figures for one state."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    limit = Limit(nbytes)
    with world_of_one(directory):
        rows = list(measure_ours(state, limit, directory / "ours", repeats))
        with without_library():
            off = measure_ours(state, limit, directory / "off", repeats)
            rows += [{**row, "what": f"{row['what']}, without the library"} for row in off]
        if peers:
            rows += measure_peers(state, limit, directory, max(2, repeats // 3))
    load = os.getloadavg()[0]
    print(f"{name}: {nbytes / 1e9:.2f} GB in {len(state)} tensors; load {load:.1f}")
    print(f"| plain copy | {limit.median * 1e3:.1f} ms | 1 |")
    for row in rows:
        if "failed" in row:
            print(f"| {row['what']} | {row['failed']} | |")
            continue
        rate = row.get("of_raw_write_rate")
        raw = f" ({rate:.2f} of the rate of raw writes)" if rate is not None else ""
        print(f"| {row['what']} | {row['seconds'] * 1e3:.1f} ms | {row['ratio']:.2f}{raw} |")
    return {
        "bytes": nbytes, "tensors": len(state), "limit_seconds": limit.median, "load": load, "rows": rows,
    }  # fmt: skip


def measure_training(gigabytes: float, directory: Path, repeats: int) -> list[Row]:
    """What checkpoints cost the steps beside them."""
    training = checkpoint_training.Training(gigabytes)
    rows = [
        *checkpoint_training.overlapped(training, directory, repeats),
        *checkpoint_training.persisting(training, directory, max(2, repeats // 3)),
        *checkpoint_training.torn(checkpoint_training.Training(0.1), directory, 3 * repeats),
    ]
    for row in rows:
        print(row)
    return rows


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--small-tensors", type=int, default=20_000)
    parser.add_argument("--tiny-tensors", type=int, default=200_000, help="of 256 bytes each")
    parser.add_argument("--states", nargs="+", default=["transformer", "small", "tiny"])
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--training", action=argparse.BooleanOptionalAction, default=True)
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
    states: dict[str, Callable[[], State]] = {
        "transformer": lambda: transformer_state(args.gigabytes),
        "small": lambda: small_state(args.gigabytes * 1e9, args.small_tensors),
        "tiny": lambda: small_state(256 * args.tiny_tensors, args.tiny_tensors),
    }
    if args.training:  # first: other libraries leave descriptors open
        with working_directory(args.directory) as directory:
            results["training"] = measure_training(args.gigabytes, directory, args.repeats)
    for name in args.states:
        with working_directory(args.directory) as directory:
            results["states"][name] = measure(
                name, states[name](), directory, args.repeats, peers=args.peers
            )
    args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
