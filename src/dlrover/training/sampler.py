"""Sampling on any number of ranks: an epoch's order of samples, and the training's position in it.

The order follows from the seed and the epoch alone. Ranks take samples from it in strides, so the samples
taken by all ranks together are a prefix of the order, whatever the number of ranks. The whole state is
therefore an epoch and one count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from dlrover._util import decoding
from dlrover.errors import ConfigurationError
from dlrover.training import batch


class _Position(msgspec.Struct, frozen=True):
    """A saved position."""

    epoch: Annotated[int, msgspec.Meta(ge=0)]
    consumed: Annotated[int, msgspec.Meta(ge=0)]
    samples: int
    shuffle: bool
    seed: int


class ElasticDistributedSampler(DistributedSampler):  # type: ignore[misc]
    """PyTorch's ``DistributedSampler``, with a position that is saved and restored on any number of ranks.

    A new epoch has the same order as with PyTorch's sampler. The position counts the samples that the
    training has taken, not those that a loader has prefetched: `ElasticTrainer` counts them, other programs
    call `record` after each step. ``state_dict`` and ``load_state_dict`` make it part of a checkpoint.

    Args:
        dataset: a dataset with a length.
        num_replicas: number of ranks that share the data; by default the process group's, or 1.
        rank: this rank among them; by default the process group's, or 0.
        shuffle: True to give each epoch its own random order.
        seed: seed of these orders; the same on all ranks.
        drop_last: True to skip the samples at the end of an epoch that are too few for all ranks, or, with
            `ElasticTrainer`, too few for a global batch. Otherwise some samples are repeated, so that all
            ranks have the same number; `ElasticTrainer` gives the repeated ones no weight.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    def __init__(  # the parameters of DistributedSampler
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
        """Samples of this epoch that all ranks together have trained on."""
        self._begun = False
        self._handed_out = self._recorded = False

    @property
    def samples(self) -> int:
        """Samples in an epoch, over all ranks."""
        return len(self.dataset)

    def order(self) -> torch.Tensor:
        """Return all sample indices in this epoch's order, equal on all ranks."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.samples, generator=generator)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of another epoch; keep the position in the current one."""
        if epoch != self.epoch:
            self._go_to(epoch, 0)

    def record(self, samples: int) -> None:
        """Count ``samples`` more as taken by all ranks together, up to the end of the epoch.

        Raises:
            ConfigurationError: the number is negative.
        """
        if samples < 0:
            raise ConfigurationError(f"samples is {samples}; it must be 0 or more.")
        self._recorded = True
        self.consumed = min(self.samples, self.consumed + samples)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices from the position to the end of the epoch."""
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
        """Begin a pass over the data, at the first request for a batch that needs ``least`` samples.

        Creating an iterator begins no pass: PyTorch's multi-process iterators create two. The first pass
        after a restore may be empty, because a checkpoint may stand at the end of an epoch.

        Raises:
            ConfigurationError: the epoch is over, and an earlier pass began in it.
        """
        if self._begun and self.samples - self.consumed < least:
            raise ConfigurationError(
                f"Epoch {self.epoch} is over; call set_epoch({self.epoch + 1}) before the next one."
            )
        self._begun = True

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the settings it depends on, as plain values, equal on all ranks.

        Raises:
            ConfigurationError: samples were handed out, but `record` was never called.
        """
        if self._handed_out and not self._recorded:
            raise ConfigurationError(
                "The sampler does not know what the training has taken: call sampler.record(samples) after"
                " each step, or use ElasticTrainer, which does."
            )
        return {"epoch": self.epoch, "consumed": self.consumed, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position, whatever the old and the new number of ranks.

        Raises:
            ConfigurationError: the position refers to other data or another order, or is none.
        """
        try:
            saved = decoding.convert(state_dict, _Position)
        except msgspec.ValidationError as error:
            raise ConfigurationError(
                f"The checkpoint holds no state of a sampler here: {error}."
            ) from error
        for key, mine in self._identity().items():
            theirs = getattr(saved, key)
            if theirs != mine:
                raise ConfigurationError(
                    f"The sampler has {key} {mine}, but the checkpoint has {theirs}: its position would mean other"
                    " samples."
                )
        if saved.consumed > self.samples:
            raise ConfigurationError(
                f"The checkpoint has consumed {saved.consumed}; it must be at most the {self.samples} samples of an epoch."
            )
        self._go_to(saved.epoch, saved.consumed)

    def _identity(self) -> dict[str, Any]:
        return {"samples": self.samples, "shuffle": self.shuffle, "seed": self.seed}

    def _go_to(self, epoch: int, consumed: int) -> None:
        self.epoch, self.consumed = epoch, consumed
        self._begun = False


class MicroBatches(Sampler):  # type: ignore[misc]
    """A batch sampler that yields this rank's part of each global batch, in micro-batches.

    `ElasticTrainer` creates it. Its length is that of a whole epoch.
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
        """Epoch and position up to which a loader has requested batches."""
        self._changes: list[tuple[tuple[int, int], int]] = []
        """Changes of the micro-batch size: epoch and position from which each applies, and the size."""
        self._shares: list[tuple[tuple[int, int], tuple[int, ...]]] = []
        """Changes of the ranks' shares: epoch and position from which each applies, and the shares."""
        self.on_begin: Callable[[], None] = _nothing
        """Callback for a loader's first request of a pass."""
        self._handed_out = self._taken = 0
        """Micro-batches requested since the loader's pass began, and micro-batches trained on."""

    @property
    def steps(self) -> int:
        """Global batches in an epoch."""
        full, rest = divmod(self.sampler.samples, self.global_batch_size)
        return full + (rest > 0 and not self.sampler.drop_last)

    def size_at(self, consumed: int) -> int:
        """Return the samples of the global batch that begins at ``consumed``; 0 if the epoch is over."""
        size = min(self.global_batch_size, self.sampler.samples - consumed)
        return 0 if self.sampler.drop_last and size < self.global_batch_size else size

    def deal(self, size: int, position: int = 0) -> list[batch.MicroBatch]:
        """Return this rank's micro-batches of the global batch that begins at ``position``."""
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
        """Set the micro-batch size from an epoch and position on; the same on all ranks."""
        self._changes.append((since, micro_batch_size))

    def share(self, shares: tuple[int, ...], since: tuple[int, int]) -> None:
        """Set the samples of each rank from an epoch and position on; the same on all ranks."""
        self._shares.append((since, shares))

    def hand_out(self, order: torch.Tensor, positions: range) -> list[int]:
        """Count a micro-batch as requested; return the indices at its positions."""
        self._handed_out += 1
        return list(order[positions.start : positions.stop : positions.step].tolist())

    def take(self) -> None:
        """Count a micro-batch as trained on.

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
        """Begin a pass from the sampler's position to the end of the epoch."""
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
    """An iterator over lists of indices. Its state is a position, for torchdata's ``StatefulDataLoader``."""

    def __init__(self, batches: MicroBatches) -> None:
        self._batches = batches
        self._position = batches.sampler.consumed
        """Start of the first global batch that was not handed out completely."""
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
        """Return the position after the last complete global batch."""
        return {**self._batches.sampler.state_dict(), "consumed": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position, together with the sampler."""
        self._batches.sampler.load_state_dict(state_dict)
        self._batches.on_begin()
        self._position = state_dict["consumed"]
        self._indices = self._generate()


def _nothing() -> None:
    pass
