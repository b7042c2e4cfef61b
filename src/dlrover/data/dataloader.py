"""A ``DataLoader`` that tunes its number of reader processes."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from dlrover import config, launched
from dlrover._util import cgroup
from dlrover.errors import ConfigurationError
from dlrover.planning.tuning import ReaderChoice, Window

logger = logging.getLogger(__name__)

BATCHES = 20
"""Minimum batches of a window."""
SECONDS = 1.0
"""Minimum seconds of a window."""
PREFETCH = 2
"""Batches that each process prefetches; PyTorch's default."""


class ElasticDataLoader(DataLoader):  # type: ignore[misc]  # torch is not typed here
    """PyTorch's ``DataLoader``; with ``--auto-tunning``, its number of processes follows the training.

    The loader measures the training's wait for batches. It changes the number between two batches: prefetched
    batches are used first, then new processes read on. The order of the samples stays the same. An
    ``IterableDataset`` divides its samples among processes itself, so its loader keeps their number.

    Args:
        dataset: as for a ``DataLoader``, like all other options.
        auto_tuning: True to let the number of processes change; by default as set by ``dlrover-run``.
        max_workers: maximum number of processes; by default twice this rank's part of the node's processors.
        options: options of ``DataLoader``. ``num_workers`` is the initial number.

    Raises:
        ConfigurationError: ``max_workers`` is smaller than ``num_workers``.
    """

    num_workers: int
    prefetch_factor: int | None

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        auto_tuning: bool | None = None,
        max_workers: int | None = None,
        **options: Any,
    ) -> None:
        self._segments: _Segments | None = None
        super().__init__(dataset, batch_size, **options)
        most = 2 * processors() if max_workers is None else max_workers
        if max_workers is not None and max_workers < self.num_workers:
            raise ConfigurationError(
                f"max_workers is {max_workers}; it must be at least num_workers, {self.num_workers}."
            )
        wanted = launched.given.auto_tuning if auto_tuning is None else auto_tuning
        self._readers: ReaderChoice | None = None
        if wanted and not isinstance(dataset, IterableDataset):
            self._segments = _Segments(super()._index_sampler)
            self._readers = ReaderChoice(self.num_workers, max(most, self.num_workers))

    @property
    def _index_sampler(self) -> Any:
        """The index sampler of PyTorch's iterators."""
        return self._segments if self._segments is not None else super()._index_sampler

    def __iter__(self) -> Any:
        return super().__iter__() if self._readers is None else self._tuned(self._readers)

    def _tuned(self, readers: ReaderChoice) -> Iterator[Any]:
        segments = self._segments
        assert segments is not None
        segments.begin()
        first = True
        while not segments.over:
            batches = self._batches(first)
            first = False
            yield from self._measured(readers, segments, batches)
            self._resize(readers.count)

    def _batches(self, first: bool) -> Any:
        """Return a PyTorch iterator: the ``first`` of an epoch, or one that continues it."""
        # The iterator draws a seed; keep the program's random numbers unchanged.
        with torch.random.fork_rng(devices=(), enabled=not first), warnings.catch_warnings():
            # PyTorch has already warned about the program's number; ours is measured.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            return super().__iter__()

    def _measured(self, readers: ReaderChoice, segments: _Segments, batches: Any) -> Iterator[Any]:
        """Yield batches until they end, or until the number of processes changes."""
        warm_up = 1 + self.num_workers * (self.prefetch_factor or 0)
        began, waited, count = time.monotonic(), 0.0, 0
        while True:
            asked = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            if warm_up > 0:
                warm_up -= 1
                began = time.monotonic()
            else:
                waited += time.monotonic() - asked
            yield batch
            count += warm_up == 0
            elapsed = time.monotonic() - began
            if count >= BATCHES and elapsed >= SECONDS and not segments.pausing:
                choice = readers.handle(Window(waited, elapsed, count))
                if choice.value != self.num_workers:
                    logger.warning(
                        "The loader's processes: %d from now on, %d until now; %s.",
                        choice.value, self.num_workers, choice.reason,
                    )  # fmt: skip
                    segments.pausing = True
                began, waited, count = time.monotonic(), 0.0, 0

    def _resize(self, count: int) -> None:
        if count == self.num_workers:
            return
        self._iterator = None  # ends persistent reader processes
        self.num_workers = count
        self.prefetch_factor = (self.prefetch_factor or PREFETCH) if count else None


class _Segments:
    """The batches of an epoch, drawn by successive iterators of a loader."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._left: Iterator[Any] = iter(())
        self.pausing = False
        """True to give the current iterator no more batches."""
        self.over = False
        """True if all batches are drawn."""

    def begin(self) -> None:
        """Begin another epoch."""
        self._left, self.over = iter(self._sampler), False

    def __iter__(self) -> Iterator[Any]:
        self.pausing = False
        while not self.pausing:
            try:
                batch = next(self._left)
            except StopIteration:
                self.over = True
                return
            yield batch

    def __len__(self) -> int:
        return len(self._sampler)


def processors() -> int:
    """Return this rank's part of its node's processors, at least 1."""
    ranks = int(config.environ().get("LOCAL_WORLD_SIZE") or 1)
    return max(1, cgroup.processors() // max(1, ranks))
