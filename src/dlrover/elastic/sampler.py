"""The order of the samples of an epoch, and how many of them the training has taken.

The order follows from seed and epoch alone. Ranks take their samples from it in strides, so what all ranks
together have taken is a beginning of that order, whatever their number. An epoch and one count are
therefore all the state that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from dlrover.elastic import batch
from dlrover.errors import ConfigurationError


class ElasticDistributedSampler(DistributedSampler):  # type: ignore[misc]
    """PyTorch's ``DistributedSampler``, whose position is saved, and restored on any number of ranks.

    A new epoch has the order that PyTorch's sampler gives it. The position counts what the training has
    taken, not what a loader has fetched ahead: `ElasticTrainer` counts it, other programs call `record`
    after each step. ``state_dict`` and ``load_state_dict`` make it part of a checkpoint.

    Args:
        dataset: a data set with a length.
        num_replicas: how many ranks share the data; by default all of the process group, or 1.
        rank: which of them this is; by default that of the process group, or 0.
        shuffle: whether each epoch has an order of its own.
        seed: of these orders; the same on all ranks.
        drop_last: whether to leave out the samples at the end of an epoch that are too few for all ranks;
            for `ElasticTrainer` those that are too few for a global batch. Otherwise some are repeated to
            have as many for each rank; `ElasticTrainer` gives the repeated ones no weight.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(  # those of DistributedSampler
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                f"dataset is a {type(dataset).__name__} without a length; its samples cannot be dealt."
            )
        joined = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if joined else 1
        if rank is None:
            rank = dist.get_rank() if joined else 0
        if not 0 <= rank < num_replicas:
            raise ConfigurationError(
                f"rank is {rank}; it must be from 0 to {num_replicas - 1}, below num_replicas."
            )
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.consumed = 0
        """Samples of this epoch that the training has taken, on all ranks together."""
        self._begun = False
        self._handed_out = self._recorded = False

    @property
    def samples(self) -> int:
        """Samples in an epoch, on all ranks together."""
        return len(self.dataset)

    def order(self) -> torch.Tensor:
        """The indices of all samples in the order of this epoch, equal on all ranks."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.samples, generator=generator)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, or stay where this one is."""
        if epoch != self.epoch:
            self._go_to(epoch, 0)

    def record(self, samples: int) -> None:
        """The training has taken ``samples`` more, on all ranks together; at most what is left counts.

        Raises:
            ConfigurationError: the number is negative.
        """
        if samples < 0:
            raise ConfigurationError(f"samples is {samples}; it must be 0 or more.")
        self._recorded = True
        self.consumed = min(self.samples, self.consumed + samples)

    def __iter__(self) -> Iterator[int]:
        """This rank's indices from the position to the end of the epoch."""
        self.begin(self.num_replicas if self.drop_last else 1)
        order = self.order()
        left = order[self.consumed :]
        excess = len(left) % self.num_replicas
        if excess and self.drop_last:
            left = left[:-excess]
        elif excess:
            filling = torch.arange(self.num_replicas - excess) % self.samples
            left = torch.cat([left, order[filling]])
        for index in left[self.rank :: self.num_replicas].tolist():
            self._handed_out = True
            yield index

    def begin(self, least: int) -> None:
        """The first batch of a pass over the data is asked for; ``least``: samples that it needs.

        Making an iterator begins no pass: those of PyTorch that have several processes make two. The first
        pass after a restore may be empty, since a checkpoint may stand at the end of an epoch.

        Raises:
            ConfigurationError: the epoch is over, and an earlier pass has begun in it.
        """
        if self._begun and self.samples - self.consumed < least:
            raise ConfigurationError(
                f"Epoch {self.epoch} is over; call set_epoch({self.epoch + 1}) before the next one."
            )
        self._begun = True

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it depends on; plain values, equal on all ranks.

        Raises:
            ConfigurationError: samples were handed out, and nobody has called `record`.
        """
        if self._handed_out and not self._recorded:
            raise ConfigurationError(
                "The sampler does not know what the training has taken: call sampler.record(samples) after"
                " each step, or use ElasticTrainer, which does."
            )
        return {"epoch": self.epoch, "consumed": self.consumed, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position, whatever the number of ranks was and is.

        Raises:
            ConfigurationError: it is a position in other data, or in another order.
        """
        for key, mine in self._identity().items():
            if state_dict[key] != mine:
                raise ConfigurationError(
                    f"The sampler has {key} {mine}, but the checkpoint has {state_dict[key]}: its position"
                    " would mean other samples."
                )
        self._go_to(state_dict["epoch"], state_dict["consumed"])

    def _identity(self) -> dict[str, Any]:
        return {"samples": self.samples, "shuffle": self.shuffle, "seed": self.seed}

    def _go_to(self, epoch: int, consumed: int) -> None:
        self.epoch, self.consumed = epoch, consumed
        self._begun = False


class MicroBatches(Sampler):  # type: ignore[misc]
    """A batch sampler: this rank's part of each global batch, in micro-batches.

    `ElasticTrainer` has one. Its length is that of a whole epoch.
    """

    def __init__(
        self,
        sampler: ElasticDistributedSampler,
        global_batch_size: int,
        micro_batch_size: int | None,
    ) -> None:
        batch.check(global_batch_size, micro_batch_size, sampler.num_replicas)
        self.sampler = sampler
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.handed_out_to = 0, 0
        """Epoch and position up to which a loader has asked for batches."""
        self._changes: list[tuple[tuple[int, int], int]] = []
        """From which epoch and position on the micro-batches have another size."""
        self._shares: list[tuple[tuple[int, int], tuple[int, ...]]] = []
        """From which epoch and position on the ranks take other shares of a global batch."""
        self.on_begin: Callable[[], None] = _nothing
        """Called when a loader begins to ask for batches."""
        self._handed_out = self._taken = 0
        """Micro-batches that a loader has asked for since it began, and that were trained on."""

    @property
    def steps(self) -> int:
        """Global batches in an epoch."""
        full, rest = divmod(self.sampler.samples, self.global_batch_size)
        return full + (rest > 0 and not self.sampler.drop_last)

    def size_at(self, consumed: int) -> int:
        """Samples in the global batch that begins there; 0 if the epoch is over."""
        size = min(self.global_batch_size, self.sampler.samples - consumed)
        return 0 if self.sampler.drop_last and size < self.global_batch_size else size

    def deal(self, size: int, position: int = 0) -> list[batch.MicroBatch]:
        """This rank's part of the global batch that begins at ``position``."""
        sampler, most = self.sampler, self.micro_batch_size
        shares: tuple[int, ...] | None = None
        for since, changed in self._changes:
            if since <= (sampler.epoch, position):
                most = changed
        for since, shared in self._shares:
            if since <= (sampler.epoch, position):
                shares = shared
        return batch.deal(size, sampler.num_replicas, sampler.rank, most, shares)

    def resize(self, micro_batch_size: int, since: tuple[int, int]) -> None:
        """Other micro-batches from an epoch and position on; the same on all ranks."""
        self._changes.append((since, micro_batch_size))

    def share(self, shares: tuple[int, ...], since: tuple[int, int]) -> None:
        """Samples of each rank from an epoch and position on; the same on all ranks."""
        self._shares.append((since, shares))

    def hand_out(self, order: torch.Tensor, positions: range) -> list[int]:
        """The indices at some positions of an order."""
        self._handed_out += 1
        return list(order[positions.start : positions.stop : positions.step].tolist())

    def take(self) -> None:
        """A micro-batch is trained on.

        Raises:
            ConfigurationError: it was not handed out.
        """
        self._taken += 1
        if self._taken > self._handed_out:
            raise ConfigurationError(
                "The samples are not those of the trainer: train on DataLoader(...,"
                " batch_sampler=trainer.batches), and call backward() once per batch."
            )

    def __iter__(self) -> MicroBatchIterator:
        """From the position of the sampler to the end of the epoch."""
        self.on_begin()
        self._handed_out = self._taken = 0
        return MicroBatchIterator(self)

    def __len__(self) -> int:
        sampler, most = self.sampler, self.micro_batch_size
        full, rest = divmod(sampler.samples, self.global_batch_size)
        count = full * batch.passes(self.global_batch_size, sampler.num_replicas, most)
        if rest and not sampler.drop_last:
            count += batch.passes(rest, sampler.num_replicas, most)
        return count


class MicroBatchIterator:
    """Lists of indices. Its state is a position too, for torchdata's ``StatefulDataLoader``."""

    def __init__(self, batches: MicroBatches) -> None:
        self._batches = batches
        self._position = batches.sampler.consumed
        """Where the first global batch begins that was not handed out in whole."""
        self._indices = self._generate()

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> list[int]:
        return next(self._indices)

    def _generate(self) -> Iterator[list[int]]:
        batches, order = self._batches, self._batches.sampler.order()
        batches.sampler.begin(batches.global_batch_size if batches.sampler.drop_last else 1)
        while size := batches.size_at(self._position):
            whole = order[self._position : self._position + size]
            micro_batches = batches.deal(size, self._position)
            batches.handed_out_to = batches.sampler.epoch, self._position + size
            for number, (positions, _) in enumerate(micro_batches, 1):
                if number == len(micro_batches):
                    self._position += size
                yield batches.hand_out(whole, positions)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last whole global batch."""
        return {**self._batches.sampler.state_dict(), "consumed": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there; the sampler goes too."""
        self._batches.sampler.load_state_dict(state_dict)
        self._batches.on_begin()
        self._position = state_dict["consumed"]
        self._indices = self._generate()


def _nothing() -> None:
    pass
