"""A dataloader that gives each rank its part of a global batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from dlrover.errors import ConfigurationError


class GlobalBatches(Sampler[list[int]]):  # type: ignore[misc]
    """The indices of one rank's samples in each global batch: every ``ranks``-th one, from the rank's number.

    All global batches have the same size. The last one of an epoch is filled up with the epoch's first samples, or
    left out with ``drop_last``. A rank without a sample gets one that has no weight.
    """

    def __init__(
        self,
        order: Sampler[int],
        *,
        batch_size: int,
        rank: int,
        ranks: int,
        drop_last: bool,
        seed: int,
    ) -> None:
        self._order, self._size, self._drop_last = order, batch_size, drop_last
        self._mine = range(rank, batch_size, ranks)
        self.weight = len(self._mine) * ranks / batch_size
        """Factor of this rank's mean loss; with it, averaged gradients are those of the global batch's mean."""
        self._generator = getattr(order, "generator", None)
        self._seed, self.epoch = seed, 0
        self.start = 0
        """Global batches that the next iteration leaves out: the training has had them."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and with it the order, of the next iteration."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0
        if hasattr(self._order, "set_epoch"):
            self._order.set_epoch(epoch)

    def __len__(self) -> int:
        count = len(self._order)
        return count // self._size if self._drop_last else -(-count // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        if self._generator is not None:
            self._generator.manual_seed(self._seed + self.epoch)
        order = list(self._order)
        for start in range(self.start * self._size, len(self) * self._size, self._size):
            batch = order[start : start + self._size]
            while len(batch) < self._size:
                batch += order[: self._size - len(batch)]
            yield [batch[position] for position in self._mine or range(1)]
        self.set_epoch(self.epoch + 1)


class GlobalLoader(DataLoader[Any]):  # type: ignore[misc]
    """A dataloader of one rank's parts of global batches; its state is where the training is in the data.

    The state is the same on all ranks, and on any number of them.
    """

    def __init__(self, dataset: Dataset[Any], batches: GlobalBatches, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=batches, **options)
        self._batches = batches
        self._taken = 0, 0

    def __iter__(self) -> Iterator[Any]:
        epoch = self._batches.epoch
        taken = self._batches.start
        for data in super().__iter__():
            taken += 1
            self._taken = epoch, taken
            yield data
        self._taken = epoch + 1, 0
        self._batches.set_epoch(epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of its global batches that were taken."""
        epoch, batches = self._taken
        return {"epoch": epoch, "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the global batches that were taken."""
        self._taken = int(state["epoch"]), int(state["batches"])
        self._batches.set_epoch(self._taken[0])
        self._batches.start = self._taken[1]


def dataloader(
    dataset: Dataset[Any],
    arguments: Mapping[str, Any] | None,
    *,
    rank: int,
    ranks: int,
    seed: int = 0,
    sampler_cls: type | None = None,
) -> GlobalLoader:
    """Return a dataloader of one rank's parts of the global batches.

    Args:
        dataset: a dataset with a length.
        arguments: arguments of ``DataLoader``; ``batch_size`` is that of the global batch, by default 1 for each rank.
        rank: the rank among those with different data.
        ranks: their number.
        seed: seed of the epochs' orders.
        sampler_cls: class of a sampler of the whole dataset, made from the dataset alone.

    Raises:
        ConfigurationError: the dataset has no length, or an argument conflicts with the global batch.
    """
    options = dict(arguments or {})
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"dataset is a {type(dataset).__name__} without a length; accepted are datasets with __len__ and __getitem__."
        )
    for name in ("sampler", "batch_sampler"):
        if name in options:
            raise ConfigurationError(
                f"dataloader_args has {name!r}; accepted is distributed_sampler_cls instead."
            )
    size = options.pop("batch_size", ranks)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigurationError(
            f"dataloader_args['batch_size'] is {size!r}; accepted is a positive integer, the global batch."
        )
    shuffle, drop_last = options.pop("shuffle", False), options.pop("drop_last", False)
    order: Sampler[int]
    if sampler_cls is not None:
        order = sampler_cls(dataset)
        # Without one, PyTorch's samplers would draw another order on each rank.
        if getattr(order, "generator", ...) is None:
            order.generator = torch.Generator()
    elif shuffle:
        order = torch.utils.data.RandomSampler(dataset, generator=torch.Generator())
    else:
        order = torch.utils.data.SequentialSampler(dataset)
    batches = GlobalBatches(order, batch_size=size, rank=rank, ranks=ranks, drop_last=drop_last, seed=seed)  # fmt: skip
    return GlobalLoader(dataset, batches, **options)
