"""`HashTable` beside the memory's limit and other libraries' embeddings; and what training with each of them achieves.

*Tables*: one thread, rows of 64 float32, random known keys in batches of 8,192: how many rows are found, made and updated
(Adagrad) in a second of CPU time, what counting uses costs, how many bytes a row takes, how fast it is saved and
loaded, and how long the longest lookup takes while a table grows. The limit is a loop in C that fetches rows ahead, whose places it
is told, and copies or updates them.

*Training*: DeepFM of example 08 on clicks whose ids come by a power law, with each library's rows under it.

Each system is measured in a process of its own, in turns, in its own environment; the ones without are left out.
``benchmarks/README.md`` explains every figure, and how the environments are made.

    python benchmarks/embedding_peers.py --torchrec-python PYTHON --tfra-python PYTHON --json FILE
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

DIM, BATCH, RATE, BATCHES = 64, 8192, 0.05, 64
VALUES = 4 * DIM
"""Bytes of a row's values; Adagrad's state takes as many."""
SPREAD = np.int64(0x2545F4914F6CDD1D)
"""Factor that spreads keys over all 64 bits, one to one."""
GROWN, SMALL = 1_000_000, 1024
"""Keys of a table that grows, and of each of its lookups."""
SECONDS = 1.0
"""CPU time of a measurement, at least."""
FEATURES, IDS, VECTOR, CLICKS, STEPS = 8, 100_000, 15, 1024, 64
"""Of the training: features, ids of each, numbers of a vector, clicks of a batch, and batches, which are used again."""
SOURCE = """
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
enum { kDim = 64, kAhead = 8 };
static void fetch(const float* row, size_t floats) {
  for (size_t i = 0; i < floats; i += 16) __builtin_prefetch(row + i);
}
void gather(size_t count, const int64_t* at, const float* rows, float* out) {
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) fetch(rows + at[i + kAhead] * kDim, kDim);
    memcpy(out + i * kDim, rows + at[i] * kDim, 4 * kDim);
  }
}
void adagrad(size_t count, const int64_t* at, float* rows, const float* gradients, float rate) {
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) fetch(rows + at[i + kAhead] * 2 * kDim, 2 * kDim);
    float *restrict values = rows + at[i] * 2 * kDim, *restrict squares = values + kDim;
    const float* gradient = gradients + i * kDim;
    for (size_t j = 0; j < kDim; ++j) {
      squares[j] += gradient[j] * gradient[j];
      values[j] -= rate * (gradient[j] / (sqrtf(squares[j]) + 1e-10f));
    }
  }
}
void make(size_t count, float* rows, float* out) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t j = 0; j < kDim; ++j) out[i * kDim + j] = (float)j;
    memcpy(rows + i * 2 * kDim, out + i * kDim, 4 * kDim);
    memset(rows + i * 2 * kDim + kDim, 0, 4 * kDim);
  }
}
"""


# ---- systems


class Limit:
    """Loops in C over rows whose places are known."""

    grows, packages = True, ("numpy",)

    def __init__(self, rows: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder, "limit.c"), Path(folder, "limit.so")
            source.write_text(SOURCE)
            options = ["-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC"]
            subprocess.run(["cc", *options, str(source), "-o", str(made), "-lm"], check=True)
            self._c = ctypes.CDLL(str(made))
        self._c.adagrad.argtypes = [ctypes.c_size_t, *(ctypes.c_void_p,) * 3, ctypes.c_float]
        self._made, self._wide = 0, np.empty((rows, 2 * DIM), np.float32)
        self._out = np.empty((BATCH, DIM), np.float32)
        self._rows: np.ndarray | None = None

    def given(self, keys: np.ndarray) -> np.ndarray:
        """Return keys in the form of this system."""
        return keys

    def insert(self, keys: np.ndarray) -> None:
        """Make the rows that come next."""
        at = self._wide[self._made :].ctypes.data
        self._c.make(ctypes.c_size_t(len(keys)), ctypes.c_void_p(at), _at(self._out))
        self._made += len(keys)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return rows."""
        if self._rows is None:
            self._rows = np.ascontiguousarray(self._wide[:, :DIM])
        self._c.gather(ctypes.c_size_t(len(keys)), _at(keys), _at(self._rows), _at(self._out))
        return self._out[: len(keys)]

    def updater(self, keys: np.ndarray, gradients: np.ndarray) -> Callable[[], object]:
        """Return what updates rows."""
        where = _at(keys), _at(self._wide), _at(gradients)
        return lambda: self._c.adagrad(len(keys), *where, RATE)

    def save(self, path: Path) -> None:
        """Write as many bytes."""
        with path.open("wb", buffering=0) as file:
            for part in np.array_split(self._wide, 1 + self._wide.nbytes // (8 << 20)):
                file.write(part.data)

    def load(self, path: Path) -> None:
        """Read them into new memory."""
        whole = np.empty_like(self._wide)
        with path.open("rb", buffering=0) as file:
            for part in np.array_split(whole, 1 + whole.nbytes // (8 << 20)):
                file.readinto(part.data)


class Numpy:
    """Arrays of a fixed size, whose keys are places."""

    grows, packages = False, ("numpy",)

    def __init__(self, rows: int) -> None:
        self._rows = np.full((rows, DIM), 0.01, np.float32)
        self._squares = np.zeros((rows, DIM), np.float32)

    def given(self, keys: np.ndarray) -> np.ndarray:
        """Return keys in the form of this system."""
        return keys

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return rows."""
        return self._rows.take(keys, 0)

    def updater(self, keys: np.ndarray, gradients: np.ndarray) -> Callable[[], object]:
        """Return what updates rows."""

        def update() -> None:
            order = np.argsort(keys)
            distinct, starts = np.unique(keys[order], return_index=True)
            sums = np.add.reduceat(gradients[order], starts)
            squares = self._squares[distinct] + sums * sums
            self._squares[distinct] = squares
            self._rows[distinct] -= RATE * sums / (np.sqrt(squares) + 1e-10)

        return update

    def save(self, path: Path) -> None:
        """Write rows and state."""
        with path.open("wb") as file:
            np.save(file, self._rows)
            np.save(file, self._squares)

    def load(self, path: Path) -> None:
        """Read them."""
        with path.open("rb") as file:
            self._rows, self._squares = np.load(file), np.load(file)


class Dlrover:
    """`HashTable` with its defaults."""

    grows, packages = True, ("numpy", "dlrover")

    def __init__(self, rows: int) -> None:
        from dlrover.embedding import HashTable  # noqa: PLC0415

        self.table = HashTable(DIM, optimizer="adagrad", learning_rate=RATE)

    def given(self, keys: np.ndarray) -> np.ndarray:
        """Return keys in the form of this system."""
        return keys * SPREAD

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return rows, and make those that are missing."""
        return self.table.lookup(keys)

    insert = find

    def peek(self, keys: np.ndarray) -> np.ndarray:
        """Return rows; that is no use of them."""
        return self.table.peek(keys)

    def updater(self, keys: np.ndarray, gradients: np.ndarray) -> Callable[[], object]:
        """Return what updates rows."""
        return lambda: self.table.update(keys, gradients)

    def save(self, path: Path) -> None:
        """Write rows and state."""
        self.table.save(path)

    def load(self, path: Path) -> None:
        """Read them."""
        self.table = type(self.table).load(path)


class Torch:
    """`torch.nn.EmbeddingBag` of a fixed size with sparse gradients, each bag of one key."""

    grows, packages = False, ("numpy", "torch")

    def __init__(self, rows: int) -> None:
        import torch  # noqa: PLC0415

        torch.set_num_threads(1)
        self._torch = torch
        self._offsets = torch.arange(BATCH + 1)
        self._make(rows)

    def _make(self, rows: int) -> None:
        torch = self._torch
        self._bag = torch.nn.EmbeddingBag(
            rows, DIM, mode="sum", sparse=True, include_last_offset=True
        )
        self._optimizer = torch.optim.Adagrad(self._bag.parameters(), RATE)

    def _forward(self, keys: Any) -> Any:
        return self._bag(keys, self._offsets[: len(keys) + 1])

    def given(self, keys: np.ndarray) -> Any:
        """Return keys in the form of this system."""
        return self._torch.from_numpy(keys)

    def find(self, keys: Any) -> Any:
        """Return rows."""
        with self._torch.no_grad():
            return self._forward(keys)

    def updater(self, keys: Any, gradients: np.ndarray) -> Callable[[], object]:
        """Return what updates rows: the backward pass and the optimizer's step."""
        found, given = self._forward(keys), self._torch.from_numpy(gradients)

        def update() -> None:
            found.backward(given)
            self._optimizer.step()
            self._optimizer.zero_grad()

        return update

    def save(self, path: Path) -> None:
        """Write rows and state."""
        self._torch.save((self._bag.state_dict(), self._optimizer.state_dict()), path)

    def load(self, path: Path) -> None:
        """Read them."""
        rows, state = self._torch.load(path)
        self._bag.load_state_dict(rows)
        self._optimizer.load_state_dict(state)


class Fbgemm(Torch):
    """torchrec's kernel on the CPU, which updates rows in the backward pass."""

    packages = ("numpy", "torch", "torchrec", "fbgemm-gpu-cpu")

    def _make(self, rows: int) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: PLC0415
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # noqa: PLC0415
            EmbeddingLocation,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # noqa: PLC0415
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self._bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=RATE,
            eps=1e-10,
        )
        self._bags.split_embedding_weights()[0].uniform_(-0.05, 0.05)

    def _forward(self, keys: Any) -> Any:
        return self._bags(keys, self._offsets[: len(keys) + 1])

    def updater(self, keys: Any, gradients: np.ndarray) -> Callable[[], object]:
        """Return what updates rows: the backward pass."""
        found, given = self._forward(keys), self._torch.from_numpy(gradients)
        return lambda: found.backward(given)

    def save(self, path: Path) -> None:
        """Write rows and state."""
        self._torch.save(self._bags.state_dict(), path)

    def load(self, path: Path) -> None:
        """Read them."""
        self._bags.load_state_dict(self._torch.load(path))


class Tfra:
    """Dynamic embeddings of TensorFlow Recommenders Addons in a `CuckooHashTable`, with one thread."""

    grows, packages = True, ("numpy", "tensorflow-cpu", "tensorflow-recommenders-addons")

    def __init__(self, rows: int) -> None:
        import tensorflow as tf  # noqa: PLC0415
        from tensorflow_recommenders_addons import dynamic_embedding as de  # noqa: PLC0415

        self._tf, self._de = tf, de
        try:
            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        except RuntimeError:  # another table of this process has set them
            pass
        self._variable = de.get_variable(
            f"rows{time.monotonic_ns()}",
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            dim=DIM,
            devices=["/CPU:0"],
        )
        self._table = self._variable.tables[0]
        self._rows = tf.random.uniform((BATCH, DIM), -0.05, 0.05)
        self._shadow: Any = None

    def given(self, keys: np.ndarray) -> Any:
        """Return keys in the form of this system."""
        return self._tf.constant(keys * SPREAD)

    def insert(self, keys: Any) -> None:
        """Make rows with given values."""
        self._table.insert(keys, self._rows[: len(keys)])

    def find(self, keys: Any) -> Any:
        """Return rows."""
        return self._table.lookup(keys)

    def updater(self, keys: Any, gradients: np.ndarray) -> Callable[[], object]:
        """Return what updates rows: the backward pass and the optimizer's step."""
        tf, de = self._tf, self._de
        if self._shadow is None:
            self._shadow = de.shadow_ops.ShadowVariable(self._variable, name="shadow")
            self._optimizer = de.DynamicEmbeddingOptimizer(
                tf.keras.optimizers.legacy.Adagrad(RATE, 0.0, 1e-10)
            )
        with tf.GradientTape() as tape:
            found = de.shadow_ops.embedding_lookup(self._shadow, keys)
        given = tf.constant(gradients)

        def update() -> None:
            slopes = tape.gradient(found, [self._shadow], given)
            self._optimizer.apply_gradients(zip(slopes, [self._shadow], strict=True))

        return update

    def save(self, path: Path) -> None:
        """Write rows without the state, which is a table of its own."""
        self._table.save_to_file_system(str(path.parent), path.name)

    def load(self, path: Path) -> None:
        """Read them."""
        self._table.clear()
        self._table.load_from_file_system(str(path.parent), path.name)


SYSTEMS: dict[str, Any] = {
    "limit": Limit,
    "numpy": Numpy,
    "dlrover": Dlrover,
    "torch": Torch,
    "fbgemm": Fbgemm,
    "tfra": Tfra,
}


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


# ---- tables


def table(name: str, rows: int, place: str, *, files: bool) -> dict[str, float]:
    """Measure one system; only with ``files`` how it is saved and how it grows by few keys at a time."""
    random = np.random.default_rng(0)
    first = SYSTEMS[name](1)
    first.find(first.given(np.zeros(1, np.int64)))  # imports, and whatever a first call does
    found: dict[str, float] = {}
    empty, system = resident(), SYSTEMS[name](rows)
    if system.grows:
        found |= growth(system, random.permutation(rows), BATCH, "new memory")
        found["bytes"] = (resident() - empty) / rows
        del system
        system = SYSTEMS[name](rows)
        found |= growth(system, random.permutation(rows), BATCH, "freed memory")
    found |= steps(system, rows, random)
    if files:
        found |= saved(system, place)
    del system
    if files and SYSTEMS[name].grows:
        system = SYSTEMS[name](GROWN)
        found |= growth(system, random.permutation(GROWN), SMALL, f"{SMALL} keys")
    return found


def steps(system: Any, rows: int, random: np.random.Generator) -> dict[str, float]:
    """Millions of keys a second that are found and updated, and what counting costs."""
    given = [system.given(random.integers(0, rows, BATCH)) for _ in range(BATCHES)]
    found = {"found, M/s": rate(lambda i: spent(system.find, given[i])[0])}
    if hasattr(system, "peek"):
        found["counting, %"] = counting(system, given)
    checked(system, rows)
    slopes = random.standard_normal((BATCH, DIM), np.float32)
    for keys in given:  # states get their memory
        system.updater(keys, slopes)()
    found["updated, M/s"] = rate(lambda i: spent(system.updater(given[i], slopes))[0])
    return found


def batches_of(system: Any, keys: np.ndarray, size: int) -> Iterator[Any]:
    """Yield keys in parts, in the form of a system."""
    for first in range(0, len(keys), size):
        yield system.given(keys[first : first + size])


def spent(action: Callable[..., object], *given: object) -> tuple[float, float]:
    """CPU time of this process, and of this thread, that an action takes."""
    before = time.process_time(), time.thread_time()
    action(*given)
    return time.process_time() - before[0], time.thread_time() - before[1]


def rate(seconds: Callable[[int], float]) -> float:
    """Millions of keys a second; each number of a batch gives the time it takes."""
    total, count = 0.0, 0
    for i in range(BATCHES // 4):
        seconds(i)
    while total < SECONDS or count < BATCHES:
        total += seconds(count % BATCHES)
        count += 1
    return count * BATCH / total / 1e6


def counting(system: Any, given: list[np.ndarray]) -> float:
    """By how many per cent lookups that count are slower than those that do not, in turns with keys of other batches."""
    total = {system.find: 0.0, system.peek: 0.0}
    for i in range(4 * BATCHES):
        for place, each in enumerate(total):  # caches have forgotten a batch until its next turn
            total[each] += spent(each, given[(i + place * BATCHES // 2) % BATCHES])[0]
    return 100 * (total[system.find] / total[system.peek] - 1)


def checked(system: Any, rows: int) -> None:
    """Check that the first update with a gradient of one moves each number by the learning rate."""
    given = system.given(np.arange(min(rows, 100)))
    before = np.asarray(system.find(given)) + 0.0
    system.updater(given, np.ones(before.shape, np.float32))()
    if not isinstance(system, Limit):  # its rows are found and updated in arrays of their own
        moved = before - np.asarray(system.find(given))
        assert np.allclose(moved, RATE, atol=1e-4), moved


def saved(system: Any, place: str) -> dict[str, float]:
    """GB a second of a save and of a load: of the second ones, whose memory has just been freed."""
    for _ in range(2):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            path = Path(folder, "rows")
            save = spent(system.save, path)[0]
            nbytes = sum(each.stat().st_size for each in Path(folder).iterdir())
            load = spent(system.load, path)[0]
    return {"saved, GB/s": nbytes / save / 1e9, "loaded, GB/s": nbytes / load / 1e9}


def growth(system: Any, keys: np.ndarray, size: int, label: str) -> dict[str, float]:
    """Millions of new keys a second, and the longest call, ms of CPU time: of the thread where it is the one that works."""
    times = [spent(system.insert, part) for part in batches_of(system, keys, size)]
    calls = [of_thread if isinstance(system, Dlrover) else all_ for all_, of_thread in times]
    return {
        f"made, {label}, M/s": len(keys) / sum(all_ for all_, _ in times) / 1e6,
        f"longest call, {label}, ms": max(calls) * 1e3,
    }


def resident() -> int:
    """Bytes of this process in memory that are no pages of files."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


# ---- training


class Clicks:
    """Clicks by a hidden weight of each id; ids by the power law with exponent 1.05."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        shares = np.cumsum(np.arange(1, IDS + 1) ** -1.05)
        drawn = np.searchsorted(shares / shares[-1], random.random((STEPS, FEATURES, CLICKS)))
        self.ids = drawn.clip(max=IDS - 1)
        weights = random.normal(0, 0.5, (FEATURES, IDS))
        logits = sum(weights[i][self.ids[:, i]] for i in range(FEATURES)) - 1.0
        self.happened = random.random(logits.shape) < 1 / (1 + np.exp(-logits))


def dlrover_rows() -> tuple[Callable[[Any], Any], Callable[[np.ndarray], Any], list[Any]]:
    """`HashEmbeddingBag`: what gives rows for prepared ids, what prepares ids, and optimizers."""
    import torch  # noqa: PLC0415

    from dlrover.embedding import HashEmbeddingBag, HashTable  # noqa: PLC0415

    table_ = HashTable(1 + VECTOR, optimizer="adagrad", learning_rate=RATE)
    bag = HashEmbeddingBag(table_, [f"f{i}" for i in range(FEATURES)])
    return (
        bag,
        lambda ids: {f"f{i}": torch.from_numpy(each)[:, None] for i, each in enumerate(ids)},
        [],
    )


def torch_rows() -> tuple[Callable[[Any], Any], Callable[[np.ndarray], Any], list[Any]]:
    """`torch.nn.EmbeddingBag` for each feature, with sparse gradients."""
    import torch  # noqa: PLC0415

    bags = [
        torch.nn.EmbeddingBag(IDS, 1 + VECTOR, mode="sum", sparse=True) for _ in range(FEATURES)
    ]
    parameters = [torch.nn.init.uniform_(bag.weight, -0.05, 0.05) for bag in bags]

    def rows(given: Any) -> Any:
        return torch.cat([bag(ids) for bag, ids in zip(bags, given, strict=True)], 1)

    return (
        rows,
        lambda ids: [torch.from_numpy(each)[:, None] for each in ids],
        [torch.optim.Adagrad(parameters, RATE)],
    )


def torchrec_rows(
    *, fused: bool
) -> tuple[Callable[[Any], Any], Callable[[np.ndarray], Any], list[Any]]:
    """A collection of torchrec that is not sharded: as it is, or with the update in the backward pass."""
    import torch  # noqa: PLC0415
    from torchrec import (  # noqa: PLC0415
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        KeyedJaggedTensor,
    )
    from torchrec.modules.fused_embedding_modules import (  # noqa: PLC0415
        FusedEmbeddingBagCollection,
    )

    names = [f"f{i}" for i in range(FEATURES)]
    tables = [
        EmbeddingBagConfig(
            name=f"t{name}",
            embedding_dim=1 + VECTOR,
            num_embeddings=IDS,
            feature_names=[name],
            init_fn=lambda rows: torch.nn.init.uniform_(rows, -0.05, 0.05),
        )
        for name in names
    ]
    device = torch.device("cpu")
    options = {"optimizer_type": torch.optim.Adagrad, "optimizer_kwargs": {"lr": RATE}}
    if fused:
        collection = FusedEmbeddingBagCollection(tables, device=device, **options)
    else:
        collection = EmbeddingBagCollection(tables, device=device)
    lengths = torch.ones(FEATURES * CLICKS, dtype=torch.int64)

    def given(ids: np.ndarray) -> Any:
        return KeyedJaggedTensor(names, torch.from_numpy(ids.reshape(-1)), lengths=lengths)

    optimizers = [] if fused else [torch.optim.Adagrad(collection.parameters(), RATE)]
    return lambda ids: collection(ids).values(), given, optimizers


ROWS: dict[str, Any] = {
    "dlrover": dlrover_rows,
    "torch": torch_rows,
    "torchrec": lambda: torchrec_rows(fused=False),
    "torchrec fused": lambda: torchrec_rows(fused=True),
}


def training(name: str) -> dict[str, float]:
    """Train with one system; the first pass over the clicks is not measured."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = Path(__file__).parents[1] / "examples/08_growing_embeddings/models.py"
    spec = importlib.util.spec_from_file_location("models", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    rows, given, optimizers = ROWS[name]()
    model = models.DeepFM(FEATURES, VECTOR, 1)
    optimizers.append(torch.optim.Adam(model.parameters(), 0.001))
    clicks, numbers = Clicks(), torch.ones(CLICKS, 1)
    batches = [given(ids) for ids in clicks.ids]
    labels = torch.from_numpy(clicks.happened).float()
    losses: list[float] = []

    def step(i: int) -> None:
        logits = model(rows(batches[i]), numbers)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels[i])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    for i in range(STEPS):
        step(i)
    first, wall, total, count = statistics.fmean(losses), time.perf_counter(), 0.0, 0
    while count < STEPS or total < 3 * SECONDS:
        total += spent(step, count % STEPS)[0]
        count += 1
    return {
        "samples/s": count * CLICKS / total,
        "samples/s, wall": count * CLICKS / (time.perf_counter() - wall),
        "loss, first pass": first,
        "loss, second pass": statistics.fmean(losses[STEPS : 2 * STEPS]),
    }


# ---- turns


class Turns:
    """Processes of all systems, one after the other."""

    FIRST: ClassVar[tuple[str, ...]] = ("limit", "numpy", "dlrover", "torch")

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._pythons = dict.fromkeys(self.FIRST, sys.executable)
        if given.torchrec_python:
            names = ("fbgemm", "torchrec", "torchrec fused")
            self._pythons |= dict.fromkeys(names, given.torchrec_python)
        if given.tfra_python:
            self._pythons["tfra"] = given.tfra_python

    def of(self, systems: dict[str, Any]) -> list[str]:
        """Return the systems that there are environments for."""
        return [name for name in systems if name in self._pythons]

    def ask(self, name: str, *options: str) -> Any:
        """Return what a child prints."""
        command = [self._pythons[name], __file__, "--child", name, *options]
        quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1"}
        done = subprocess.run(
            [*command, "--place", self._given.place],
            stdout=subprocess.PIPE,
            stderr=None if self._given.verbose else subprocess.DEVNULL,
            env=os.environ | quiet,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    def tables(self, sizes: list[int]) -> list[dict[str, Any]]:
        """Measure tables of each size with each system once."""
        return [
            {"system": name, "rows": rows}
            | self.ask(name, "--rows", str(rows), *(["--files"] if rows == min(sizes) else []))
            for rows in sizes
            for name in self.of(SYSTEMS)
        ]

    def trainings(self) -> list[dict[str, Any]]:
        """Train with each system once."""
        return [{"system": name} | self.ask(name, "--training") for name in self.of(ROWS)]


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians of each system's runs, and the least and the greatest of each figure."""
    keys = list(dict.fromkeys((run["system"], run.get("rows")) for run in runs))
    found = []
    for system, rows in keys:
        own = [run for run in runs if (run["system"], run.get("rows")) == (system, rows)]
        one: dict[str, Any] = {"system": system} | ({"rows": rows} if rows else {})
        for name in own[0]:
            if name not in one:
                values = [run[name] for run in own]
                low, middle, high = min(values), statistics.median(values), max(values)
                one[name] = [float(f"{value:.4g}") for value in (middle, low, high)]
        found.append(one)
    return found


def versions(name: str) -> dict[str, str]:
    """Return the versions of a system's packages."""
    names = SYSTEMS[name].packages if name in SYSTEMS else ()
    return {each: metadata.version(each) for each in names if each != "dlrover"}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 6_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs=1, choices=["tables", "training"], help="keep the other part"
    )
    parser.add_argument("--torchrec-python", help="Python with torchrec and fbgemm-gpu-cpu")
    parser.add_argument("--tfra-python", help="Python with tensorflow-recommenders-addons")
    parser.add_argument("--place", default="/dev/shm", help="directory of saved files")
    parser.add_argument("--verbose", action="store_true", help="show what the systems say")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=[*SYSTEMS, *ROWS], help=argparse.SUPPRESS)
    parser.add_argument("--files", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--training", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--versions", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        sys.stdout.write("\n" + json.dumps(child(given)) + "\n")
        return
    turns = Turns(given)
    found: dict[str, Any] = {}
    if given.json is not None and given.json.exists():
        found = json.loads(given.json.read_text())  # the other part, if only one is measured
    found["machine"] = platform.platform()
    found["versions"] = {name: turns.ask(name, "--versions") for name in turns.of(SYSTEMS)}
    for part in given.only or ("tables", "training"):
        load, runs = [os.getloadavg()[0]], []
        for _ in range(given.rounds):
            runs += turns.tables(given.rows) if part == "tables" else turns.trainings()
            load.append(os.getloadavg()[0])
            sys.stderr.write(f"{part}: {len(load) - 1} of {given.rounds}, load {load[-1]:.1f}\n")
            found[part] = {"load": load, "median, least, greatest": summary(runs), "runs": runs}
            if given.json is not None:
                given.json.write_text(json.dumps(found, indent=1) + "\n")
    for part in ("tables", "training"):
        for row in found.get(part, {}).get("median, least, greatest", ()):
            sys.stdout.write(json.dumps(row) + "\n")


def child(given: argparse.Namespace) -> dict[str, Any]:
    """Return what a child was asked for: versions, a table, or a training."""
    if given.versions:
        return versions(given.child)
    if given.training:
        return training(given.child)
    return table(given.child, given.rows[0], given.place, files=given.files)


if __name__ == "__main__":
    main()
