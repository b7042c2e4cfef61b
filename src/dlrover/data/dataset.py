"""A PyTorch dataset whose samples are distributed among all workers of a job during training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import IterableDataset, Sampler, default_collate

from dlrover.data.dataloader import ElasticDataLoader
from dlrover.data.machine.spans import Part
from dlrover.data.records import Records, Source
from dlrover.data.sources.stream import Stream
from dlrover.errors import ConfigurationError, InfrastructureError

Sample = TypeVar("Sample")

__all__ = ["ElasticDataset"]


class ElasticDataset(Records[Sample], IterableDataset[Sample]):  # type: ignore[misc]  # torch is not typed here
    """`Records` as an iterable PyTorch dataset; save it in the checkpoint, beside the model.

    ``DataLoader(data, batch_size=...)`` reads it in the training process. To read in separate processes, use
    ``data.loader(batch_size=..., num_workers=...)``: it distinguishes batches that the training has received
    from batches that are only prefetched.
    """

    def loader(
        self,
        batch_size: int,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Sample]], Any] | None = None,
        **options: Any,
    ) -> BatchLoader:
        """Return an iterable over the batches that remain in the epoch.

        Args:
            batch_size: samples per batch; the last batch of a worker in an epoch may be smaller.
            num_workers: number of reader processes; the initial number if the loader tunes itself.
            collate_fn: function that builds a batch from samples, as for a ``DataLoader``.
            options: other options of `ElasticDataLoader`, such as ``pin_memory``.

        Raises:
            ConfigurationError: an option conflicts with the distribution of samples.
        """
        wrong = options.keys() & {"sampler", "batch_sampler", "shuffle", "drop_last", "in_order"}
        if wrong or batch_size < 1:
            what = ", ".join(sorted(wrong)) or f"batch_size {batch_size}"
            raise ConfigurationError(
                f"The loader of a dataset leased in shards does not take {what}; say shuffle= and drop_last= to "
                "the data set, and a batch_size of 1 or more."
            )
        return BatchLoader(self, batch_size, num_workers, collate_fn or default_collate, options)


class Read(NamedTuple):
    """A batch from a reader process."""

    batch: Any
    """The collated batch; None if no sample could be read."""
    failed: list[tuple[int, str]]
    """Position in the batch and error message of each unreadable sample."""
    away: str = ""
    """Error of a source that is away; no sample is at fault then."""


class BatchLoader:
    """An iterable over batches, created by `ElasticDataset.loader`."""

    def __init__(
        self,
        data: ElasticDataset[Any],
        batch_size: int,
        num_workers: int,
        collate: Callable[[list[Any]], Any],
        options: dict[str, Any],
    ) -> None:
        self._data = data
        self._batches = _Batches(data, batch_size)
        self._loader = ElasticDataLoader(
            _CatchingSource(data.source),
            batch_sampler=self._batches,
            num_workers=num_workers,
            collate_fn=_Collate(collate),
            **options,
        )

    def __iter__(self) -> Iterator[Any]:
        return self._data.in_turns(self._epoch)

    def _epoch(self) -> Generator[Any, None, None]:
        again = True
        while again:  # retry unreadable samples
            again = yield from self._pass()
        self._data.end_epoch()

    def _pass(self) -> Generator[Any, None, bool]:
        """Read the available samples once; return True if some were unreadable."""
        drawn = self._batches.begin()
        some_failed = False
        try:
            for read in self._loader:
                parts = drawn.popleft()
                if read.away:
                    raise InfrastructureError(read.away)
                if read.failed:
                    some_failed = True
                    self._count(parts, dict(read.failed))
                else:
                    self._data.acknowledge([part.span for part in parts])
                if read.batch is not None:
                    yield read.batch
        finally:
            self._batches.end(drawn)
        return some_failed

    def _count(self, parts: Sequence[Part], failed: Mapping[int, str]) -> None:
        """Record each sample of a partly read batch as handed out or failed."""
        places = [place for part in parts for place, _ in part.places()]
        for at, place in enumerate(places):
            if at in failed:
                self._data.fail(place, failed[at])
            else:
                self._data.acknowledge([place])


class _Batches(Sampler[Sequence[Any]]):  # type: ignore[misc]  # torch is not typed here
    """A batch sampler that tracks the records of each batch until the training receives it."""

    def __init__(self, data: ElasticDataset[Any], batch_size: int) -> None:
        self._data = data
        self._size = batch_size
        self._running: Generator[Sequence[Any], None, None] | None = None
        self._drawn: deque[list[Part]] = deque()

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self._running = self._draw()
        return self._running

    def begin(self) -> deque[list[Part]]:
        """Begin a pass; return the place of the batches that the training has not received yet, oldest first."""
        self._stop()
        self._drawn = deque()
        return self._drawn

    def end(self, drawn: deque[list[Part]]) -> None:
        """Stop the drawing of a pass, if no other one has begun."""
        if drawn is self._drawn:
            self._stop()

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def _draw(self) -> Generator[Sequence[Any], None, None]:
        batch: list[Part] = []
        count = 0
        parts = self._data.parts()
        try:
            for part in parts:
                rest: Part | None = part
                while rest is not None:
                    piece, rest = rest.cut(self._size - count)
                    batch.append(piece)
                    count += len(piece.items)
                    if count == self._size:
                        full, batch, count = batch, [], 0
                        yield self._noted(full)
            if batch:
                full, batch = batch, []
                yield self._noted(full)
        finally:
            parts.close()

    def _noted(self, batch: list[Part]) -> Sequence[Any]:
        self._drawn.append(batch)
        self._data.note_reading(batch[0].span)
        if len(batch) == 1:
            return batch[0].items
        return [item for part in batch for item in part.items]


class _CatchingSource:
    """The source in a reader process; returns read errors as values instead of raising them."""

    def __init__(self, source: Source[Any] | Stream[Any]) -> None:
        self._source: Any = source

    def __getitem__(self, item: Any) -> Any:
        try:
            return self._source[item]
        except Exception as error:
            if isinstance(error, InfrastructureError):
                raise
            return _Unreadable(f"{type(error).__name__}: {error}")

    def __getitems__(self, items: Sequence[Any]) -> list[Any] | _OneByOne | _Away:
        """Return the samples of a batch; on an error, read one by one to find the failing samples."""
        try:
            return self._read(items)
        except InfrastructureError as error:
            return _Away(str(error))

    def _read(self, items: Sequence[Any]) -> list[Any] | _OneByOne:
        source = self._source
        many = getattr(source, "__getitems__", None)
        try:
            return [source[item] for item in items] if many is None else list(many(list(items)))
        except Exception as error:
            if isinstance(error, InfrastructureError):
                raise
            return _OneByOne(self[item] for item in items)


class _OneByOne(tuple[Any, ...]):
    """Samples that were read one by one; some may be `_Unreadable`."""


class _Unreadable(NamedTuple):
    error: str


class _Away(NamedTuple):
    error: str


class _Collate:
    """A collate function that skips unreadable samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any] | _OneByOne | _Away) -> Read:
        if isinstance(samples, _Away):
            return Read(None, [], samples.error)
        if not isinstance(samples, _OneByOne):
            return Read(self._collate(samples), [])
        good = [sample for sample in samples if not isinstance(sample, _Unreadable)]
        failed = [(at, s.error) for at, s in enumerate(samples) if isinstance(s, _Unreadable)]
        return Read(self._collate(good) if good else None, failed)
