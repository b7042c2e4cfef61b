"""The model of ``survives.py`` and its data: in 64 bits, so that sums in another order differ little."""

import time
from collections.abc import Callable, Iterable

import torch
import uncompiled  # noqa: F401 - nothing here is compiled

torch.manual_seed(1)
torch.set_num_threads(1)
BATCH, PASS = 24, 2
"""Samples of a step of ``Replicas``, and of a pass through the model."""
PAUSE = 0.08
"""Seconds that a step takes; with a model in DDP or FSDP, half of them are a validation."""
DROPOUT = 0.1
"""Part of the numbers that `Replicas` leave out at random."""
data = torch.randn(4096, 16, dtype=torch.float64)
classes = torch.randint(0, 4, (4096,))


class Slow(torch.nn.Linear):
    """A layer that takes the time of a pass; a rank that returns to its place does not compute it."""

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE / 2)
        return super().forward(samples)


def make(first: type[torch.nn.Linear], divide: Callable[[torch.nn.Module], object] = id) -> tuple:
    """Return a model that begins with a layer, its optimizer and its scheduler; ``divide`` is called with its parts."""
    model = torch.nn.Sequential(first(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 4)).double()
    for part in (model[0], model[2], model):
        divide(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)


def loss_of(model: torch.nn.Module, samples: range, dropout: float = 0.0) -> torch.Tensor:
    """Return the mean loss of samples."""
    chosen = torch.arange(samples.start, samples.stop) % len(data)
    seen = torch.nn.functional.dropout(data[chosen], dropout)
    return torch.nn.functional.cross_entropy(model(seen), classes[chosen])


def total(weights: Iterable[torch.Tensor]) -> float:
    """Return the sum of weights without their signs."""
    return sum(float(one.detach().abs().sum()) for one in weights)
