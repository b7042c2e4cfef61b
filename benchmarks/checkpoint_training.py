"""What checkpoints cost a training that goes on: overlapped saves, and persists beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._experimental import builder
from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig

from dlrover.checkpoint import Checkpointer

Row = dict[str, Any]


class Training:
    """A stack of linear layers with Adam; parameters and moments are about so many gigabytes."""

    def __init__(
        self, gigabytes: float, width: int = 2048, device: str = "cpu", batch: int = 256
    ) -> None:
        torch.manual_seed(0)
        layers = max(1, round(gigabytes * 1e9 / (3 * 4 * width * width)))
        with torch.device(device):
            self.model = torch.nn.Sequential(
                *[torch.nn.Linear(width, width) for _ in range(layers)]
            )
            self.batch = torch.randn(batch, width)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, foreach=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.step()

    def step(self) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors."""
        found = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{key}": value for key, value in state.items()}
        return found


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes, with the work that it queues on an accelerator."""
    finish()
    began = time.perf_counter()
    call()
    finish()
    return time.perf_counter() - began


def finish() -> None:
    """Wait until the accelerator, if there is one, has nothing to do."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def overlapped(training: Training, directory: Path, repeats: int) -> Iterator[Row]:
    """How soon an overlapped save returns, and how much longer the next step takes."""
    checkpointer = Checkpointer(directory / "overlap", linger=0.0, overlap=True)
    checkpointer.load(training.state)
    for number in range(1, 4):  # every generation was used once
        checkpointer.save(number, training.state)
        training.step()
    returned, plain, after = [], [], []
    for number in range(10, 10 + repeats):
        plain.append(seconds(training.step))
        finish()
        began = time.perf_counter()
        checkpointer.save(number, training.state)
        returned.append(time.perf_counter() - began)  # the copy goes on
        after.append(seconds(training.step))
        checkpointer.wait()
    checkpointer.close()
    slower = statistics.median(a / p for a, p in zip(after, plain, strict=True))
    yield {
        "what": "overlapped save returns after",
        "seconds": statistics.median(returned),
        "worst": max(returned),
        "next_step": slower,
    }


def persisting(training: Training, directory: Path, repeats: int) -> Iterator[Row]:
    """How much longer steps take while a checkpoint is written to storage."""
    checkpointer = Checkpointer(directory / "persist", keep=1, linger=0.0)
    checkpointer.load(training.state)
    checkpointer.save(1, training.state)
    plain, beside = [], []
    for number in range(10, 10 + repeats):
        plain += [seconds(training.step) for _ in range(3)]
        checkpointer.save(number, training.state, to="storage")
        stored = directory / "persist" / f"step-{number}" / "manifest.json"
        while not stored.exists():
            beside.append(seconds(training.step))
        checkpointer.wait()
    checkpointer.close()
    yield {
        "what": "a step while a checkpoint is persisted",
        "seconds": statistics.median(beside),
        "ratio_to_step": statistics.mean(beside) / statistics.mean(plain),
        "steps": len(beside),
    }


def torn(training: Training, directory: Path, repeats: int) -> Iterator[Row]:
    """How many checkpoints hold a mixture when the optimizer steps at once after the save."""
    yield {
        "what": "torn, overlapped",
        "of": repeats,
        "torn": _ours_torn(training, directory, repeats),
    }
    yield {
        "what": "torn, torch's experimental asynchronous one, staging not waited for",
        "of": repeats,
        "torn": _theirs_torn(training, directory, repeats),
    }


def _update(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.optimizer.step()


def _ours_torn(training: Training, directory: Path, repeats: int) -> int:
    checkpointer = Checkpointer(directory / "torn", keep=1, linger=0.0, overlap=True)
    count = 0
    for number in range(repeats):
        expected = {key: tensor.clone() for key, tensor in training.model.state_dict().items()}
        checkpointer.save(number, training.state)
        _update(training)
        checkpointer.wait()
        _, found = checkpointer.read() or (None, {})
        count += any(not torch.equal(found["model"][key], expected[key].cpu()) for key in expected)
    checkpointer.close()
    return count


def _theirs_torn(training: Training, directory: Path, repeats: int) -> int:
    checkpointer = experimental()
    count = 0
    for number in range(repeats):
        expected = {key: tensor.clone() for key, tensor in training.model.state_dict().items()}
        path = directory / f"theirs-{number}"
        staged, written = checkpointer.save(str(path), dict(training.model.state_dict()))
        _update(training)
        staged.result()
        written.result()
        found = checkpointer.load(str(path))
        count += any(not torch.equal(found[key], expected[key]) for key in expected)
    checkpointer.close()
    return count


def experimental() -> Any:
    """Torch's experimental asynchronous checkpointer, as it can be used without an accelerator."""
    staging = CheckpointStagerConfig(
        use_pinned_memory=False,
        use_shared_memory=True,
        use_async_staging=True,
        use_non_blocking_copy=False,
    )
    return builder.make_async_checkpointer(builder.CheckpointerConfig(staging_config=staging))
