"""The original's elastic trainer, sampler and loader, whose scripts keep their own loop.

What was wrong there is right here: accumulated gradients are averaged, not summed; ``zero_grad`` at the start of a step
keeps what earlier passes have added; all ranks make the same number of passes; a position counts what was trained on,
also after a restart in the middle of an epoch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrover import config
from dlrover.data.dataloader import ElasticDataLoader as Loader
from dlrover.errors import ConfigurationError
from dlrover.training.sampler import ElasticDistributedSampler as Sampler

LOADER_ARGUMENTS = (
    "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory", "drop_last",
)  # fmt: skip
"""Arguments of ``DataLoader`` that scripts pass by position, after the dataset."""


class ElasticDistributedSampler(Sampler):
    """A sampler with the original's ``state_dict(iter_step, micro_batch_size)`` and its two values."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counted = False
        """True if the loader counts what was trained on."""

    def __iter__(self) -> Iterator[int]:
        if self._begun and self.consumed >= self.samples:
            self._go_to(self.epoch, 0)  # the original repeats an epoch unless set_epoch was called
        return super().__iter__()

    def count(self, samples: int) -> None:
        """Count samples as trained on; the loader does."""
        self._counted = True
        self.record(samples)

    def state_dict(self, iter_step: int = 0, micro_batch_size: int = 1) -> dict[str, Any]:
        """Return the position: what `ElasticDataLoader` has counted, else what the arguments say."""
        done = self.consumed
        if not self._counted:
            done = iter_step * micro_batch_size * self.num_replicas
        return {"completed_num": done, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position, whatever the old and the new number of ranks."""
        done = int(state_dict.get("completed_num", 0))
        if done < 0:
            raise ConfigurationError(f"completed_num is {done}; it must be 0 or more.")
        if done > self.samples:
            done %= self.samples  # steps that were counted over epochs
        self._go_to(int(state_dict.get("epoch", 0)), done)


class ElasticDataLoader(Loader):
    """A loader that takes its batch size from a file, and counts for `ElasticDistributedSampler`.

    Args:
        dataset: as for a ``DataLoader``, like all other arguments.
        config_file: JSON file with ``{"dataloader": {"batch_size": 32}}``, read once, here, and by `load_config`.
    """

    def __init__(
        self, dataset: Any, *arguments: Any, config_file: str | None = None, **options: Any
    ) -> None:
        options |= dict(zip(LOADER_ARGUMENTS, arguments, strict=False))
        if len(arguments) > len(LOADER_ARGUMENTS):
            raise ConfigurationError(
                f"ElasticDataLoader has {1 + len(arguments)} positional arguments; name those after drop_last."
            )
        super().__init__(dataset, **options)
        self._config_file = config_file
        if config_file:
            self.load_config()

    def load_config(self, config_file: str | None = None) -> None:
        """Take the batch size from the file, if it is there and names one."""
        path = Path(config_file or self._config_file or "")
        if not path.is_file():
            return
        try:
            wanted = json.loads(path.read_text()).get("dataloader", {}).get("batch_size", 0)
        except (ValueError, AttributeError) as error:
            raise ConfigurationError(f"{path} is not the JSON of a loader: {error}.") from error
        if wanted > 0:
            self.update_batch_size(wanted)

    def update_batch_size(self, batch_size: int | None = None) -> None:
        """Set the batch size of the next epoch; without a value, read it from the file."""
        if batch_size is None:
            self.load_config()
        elif self.batch_sampler is None or not hasattr(self.batch_sampler, "batch_size"):
            raise ConfigurationError(
                "The loader has a batch_sampler of its own; set the batch size there."
            )
        else:
            self.batch_sampler.batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        sampler = self.sampler if self.batch_size is not None else None
        for batch in super().__iter__():
            if isinstance(sampler, ElasticDistributedSampler):
                sampler.count(self.batch_sampler.batch_size * sampler.num_replicas)
            yield batch


class ElasticTrainer:
    """A trainer that keeps the global batch when the number of workers is smaller than the most there may be.

    With ``WORKER_NUM`` nodes as the most, fewer ranks accumulate the gradients of several passes. The sum of a batch is
    that of the same number of passes on every rank, so it is somewhat larger where the numbers do not divide;
    `dlrover.training.ElasticTrainer` has no such difference.
    """

    def __init__(self, model: torch.nn.Module, dataloader: Any = None, **_: Any) -> None:
        self.model, self.dataloader = model, dataloader
        self.optimizer: Any = None
        self.gradient_accumulation_steps = 1
        self._pass, self._steps = 0, 0
        """Passes of this batch that have begun, and steps of this epoch."""
        self._stepped = False
        self._passes = 1
        self._hooks: list[Any] = []

    def prepare(self, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """Return the optimizer, and the scheduler if given; both act in the last pass of a batch only."""
        environ = config.environ()
        most = int(environ.get("WORKER_NUM") or environ.get("NODE_NUM") or 1)
        most *= int(environ.get("LOCAL_WORLD_SIZE") or 1)
        joined = dist.is_available() and dist.is_initialized()
        self.gradient_accumulation_steps = math.ceil(
            most / (dist.get_world_size() if joined else 1)
        )
        self.optimizer = optimizer
        optimizer.step = self._only_last(optimizer.step, self._note_step)
        optimizer.zero_grad = self._only_first(optimizer.zero_grad)
        if lr_scheduler is None:
            return optimizer
        lr_scheduler.step = self._only_last(lr_scheduler.step)
        return optimizer, lr_scheduler

    @property
    def num_steps(self) -> int:
        """Steps since `reset`."""
        return self._steps

    def reset(self) -> None:
        """Count steps from 0, as at the beginning of an epoch."""
        self._steps = 0

    @contextlib.contextmanager
    def epoch(self, num_epochs: int) -> Iterator[None]:
        """Enclose an epoch."""
        self.reset()
        yield

    @contextlib.contextmanager
    def step(self, fix_total_batch_size: bool = False) -> Iterator[None]:
        """Enclose one pass, with its backward pass and the optimizer's step.

        Args:
            fix_total_batch_size: True to make the optimizer step after as many passes as the global batch needs.
        """
        if self._pass == 0:
            self._passes = self.gradient_accumulation_steps if fix_total_batch_size else 1
            self._average(self._passes)
        self._pass += 1
        last = self._pass == self._passes
        context: Any = contextlib.nullcontext()
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(last)
        elif not last and hasattr(self.model, "no_sync"):
            context = self.model.no_sync()
        with context:
            yield
        if last:
            self._steps += 1
            self._pass, self._stepped = 0, False

    def report_training_step(self) -> None:
        """Do nothing: the steps are counted in the optimizer."""

    def _average(self, passes: int) -> None:
        """Divide the gradients of each pass by the number of passes."""
        if bool(self._hooks) == (passes > 1):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = [] if passes == 1 else [
            parameter.register_hook(lambda gradient: gradient / passes)
            for parameter in self.model.parameters() if parameter.requires_grad
        ]  # fmt: skip

    def _note_step(self) -> None:
        self._stepped = True

    def _only_last(
        self, call: Callable[..., Any], then: Callable[[], None] = lambda: None
    ) -> Callable[..., Any]:
        """Return ``call``, which does nothing in passes before the last one of a batch."""

        @functools.wraps(call)
        def gated(*args: Any, **options: Any) -> Any:
            if 0 < self._pass < self._passes:
                return None
            made = call(*args, **options)
            then()
            return made

        return gated

    def _only_first(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, which does nothing while gradients of the batch wait for the step."""

        @functools.wraps(call)
        def gated(*args: Any, **options: Any) -> Any:
            return call(*args, **options) if self._pass < 2 or self._stepped else None

        return gated
