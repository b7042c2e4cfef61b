"""What the programs that `test_engines` disturbs have in common; it knows nothing of losses."""

import os
import sys
import time
from pathlib import Path

import torch

SAVE_EVERY = 10
"""Steps between two checkpoints and evaluations."""


class Rows(torch.utils.data.Dataset):
    """512 samples with their numbers: 16 steps of two ranks, two micro-batches and 8 samples each."""

    def __init__(self) -> None:
        self.inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
        self.labels = self.inputs[:, :4].argmax(1)

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> dict[str, object]:
        return {"index": i, "x": self.inputs[i], "labels": self.labels[i]}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.body = torch.nn.Sequential(
                torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
            )

    def forward(self, x, labels):
        time.sleep(
            0.02
        )  # as long as a larger model takes; a rank that replays has not to wait for it
        logits = self.body(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.95)


def mark_of(tensors) -> str:
    """A number that tells weights from others."""
    return f"{sum(float(tensor.detach().double().abs().sum()) for tensor in tensors):.6f}"


class Log:
    """What a rank writes: its pid, the numbers of its samples, and after each step what holds then."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.out = Path(sys.argv[1])
        self._file = (self.out / f"rank{os.environ['RANK']}.txt").open("a", buffering=1)
        self._file.write(f"pid {os.getpid()}\n")
        self._last = self.out / "last"

    def saw(self, numbers: torch.Tensor) -> None:
        self._file.write(f"saw {' '.join(map(str, numbers.tolist()))}\n")

    def step(self, step: int, model: torch.nn.Module, rate: float) -> bool:
        """Write of a step; return whether the training goes on: until the step in the file ``last``."""
        self._file.write(f"step {step} {mark_of(model.parameters())} {rate:.9f}\n")
        return not (self._last.exists() and step >= int(self._last.read_text()))

    def end(self, model: torch.nn.Module) -> None:
        torch.save(model.state_dict(), self.out / "end.pt")
