"""A dataset as a training script reads it, without any framework."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from dlrover import launched
from dlrover._util import decoding
from dlrover.data import services
from dlrover.data.client import Reader, ShardClient
from dlrover.data.machine import order
from dlrover.data.machine.partition import epoch_size
from dlrover.data.machine.spans import Part, Spans
from dlrover.data.machine.state import (
    NO_READER,
    RankData,
    began,
    began_as,
    count,
    merged,
)
from dlrover.data.sources.blocks import InBlocks, shard_of
from dlrover.data.sources.stream import Stream
from dlrover.data.streamed import StreamReader
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.spec.requests.shards import DataSpec, Incarnation, Span, data_key

Sample_co = TypeVar("Sample_co", covariant=True)
Item = TypeVar("Item")

SHARDS = 1000
"""Minimum number of shards in a dataset, unless the shard size is set."""
LARGEST = 1000
"""Maximum number of samples in a shard, unless the shard size is set."""
SETTLED = 10_000
"""Spans that a rank saves of its own until it asks to leave out what a stored checkpoint contains."""
CALL_BITS = 20
"""Bits of an incarnation's number below that of the call of a restartable function."""
_OPENED: dict[str, tuple[int, weakref.ref[Any], Incarnation]] = {}
"""By name, the last data set that this process has opened: the call, itself, and its incarnation."""
_LOADS = Counter[tuple[int, str]]()
"""Checkpoints that this process has restored, by call and dataset: each begins an incarnation of the job's readers."""


class Source(Protocol[Sample_co]):
    """Samples by number: a list, a map-style dataset of PyTorch, files of `dlrover.data.sources`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Sample_co:
        """Return one sample."""


class Readers(NamedTuple):
    """What the readers of a data set share if each starts and ends by itself, instead of in the job's rounds."""

    incarnation: Incarnation
    """A later one begins anew, with ``base``."""
    base: bytes
    """Samples that the model had learned from (packed `Spans`)."""
    reader: Reader
    """This one; another start of it has another name."""


class Records(Generic[Sample_co]):
    """Samples shared among all workers of a job: in each epoch, every sample goes to one worker.

    Iterating yields the rest of the epoch; the next iteration is the next epoch. Save ``state_dict`` in a
    checkpoint together with the model: a restore puts both at the same sample, on any number of workers.
    A sample is acknowledged once it is handed to the training. Without a master (a program that runs alone)
    the process leases to itself in the same way.

    A stream has one epoch, which ends when the stream does: mostly never.

    Args:
        source: the samples; the same, and in the same order, on all workers. Or a `Stream`, or its address.
        name: distinguishes the datasets of a job.
        epochs: number of times that each sample is leased; 0: endlessly.
        shuffle: use an order that depends on ``seed`` and the epoch instead of the order of the source.
            A source that is read in blocks (Parquet, tables) is shuffled by blocks, and within each block.
        seed: seed of the order; the same on all workers.
        shard: samples per lease; by default a thousandth of all, at most 1000. For a source in blocks, a
            block or an equal part of one, if that is at most a hundredth of all. For a stream: offsets.
        drop_last: leave out the incomplete last shard of each epoch.
        attempts: attempts to read a sample before it is skipped and reported.
        max_skipped: samples that a worker may skip; one more raises the error of the last.
        wait_for_others: end an epoch only when others have read their leased samples. Use this in a program
            whose workers do not wait for each other: they then read what a dead worker leaves behind.
        timeout: seconds of silence after which a worker's samples are leased to others.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(  # noqa: PLR0913 - options, by name
        self,
        source: Source[Sample_co] | Stream[Sample_co] | str,
        *,
        name: str = "data",
        epochs: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        shard: int | None = None,
        drop_last: bool = False,
        attempts: int = 3,
        max_skipped: int = 10,
        wait_for_others: bool = False,
        timeout: float = 1800.0,
    ) -> None:
        self._stream: StreamReader | None = None
        self._blocks: Sequence[Any] | None = None
        self.source: Any = source
        if isinstance(source, str | Stream):
            self.source = source if isinstance(source, Stream) else Stream(source)
            self._stream = StreamReader(self.source, shard)
            size = -1
        else:
            self._blocks = source.blocks if isinstance(source, InBlocks) else None
            size = len(source)
        self._orders = order.EpochOrders(size, self._blocks, seed, shuffle=shuffle)
        if self._stream is not None and (shuffle or epochs != 1 or drop_last):
            raise ConfigurationError(
                "A stream has no epochs, shuffle or drop_last: it is read once, in order."
            )
        self._spec = _checked(
            {
                "name": name,
                "size": size,
                "epochs": epochs,
                "shard": self._usual_shard(size) if shard is None else shard,
                "drop_last": drop_last,
                "order": self._orders.name if self._stream is None else self._stream.identity,
                "attempts": attempts,
                "max_skipped": max_skipped,
                "timeout": timeout,
            }
        )
        if not epochs and self._stream is None and not epoch_size(self._spec):
            raise ConfigurationError(
                f"The data set {name} has no samples: its size is {size}, with a shard of {self._spec.shard} and"
                f" drop_last={drop_last}; epochs=0 would never end."
            )
        self._patient = wait_for_others
        self._pid = os.getpid()
        self._client: ShardClient | None = None
        self._closed = False
        self._base = b""
        self._loads = 0
        self._reading = threading.RLock()
        self._turn = 0
        """Number of passes of loops that have begun."""
        self._readers: Readers | None = None
        self.epoch = 0
        """The current or next epoch; it ends at ``epochs``."""

    # ---- reading

    def __iter__(self) -> Iterator[Sample_co]:
        return self.in_turns(self._pass)

    def _pass(self) -> Generator[Sample_co, None, None]:
        for place, sample in self.read_ahead():
            self.acknowledge([place])
            yield sample
        self.end_epoch()

    def in_turns(
        self, begin: Callable[[], Generator[Item, None, None]]
    ) -> Generator[Item, None, None]:
        """Yield what a pass over the rest of the epoch yields, beside other such loops and restores.

        One loop reads at a time: it gets what the one before has read ahead. A loop whose turn was another's, as after
        a loop within it, begins another pass. So does a loop in which the data set is restored, in the epoch that
        the checkpoint has.

        Args:
            begin: begins a pass; what the pass does not `acknowledge` is read again. It ends with `end_epoch`.
        """
        self._opened()
        passing: Generator[Item, None, None] | None = None
        turn, loads, epoch = 0, self._loads, self.epoch
        try:
            while True:
                with self._reading:
                    if passing is None or (turn, loads) != (self._turn, self._loads):
                        if loads == self._loads and epoch != self.epoch:
                            return  # another loop has read the rest
                        self.leave_all()
                        if passing is not None:
                            passing.close()
                        self._opened()
                        self._turn += 1
                        turn, loads, epoch = self._turn, self._loads, self.epoch
                        passing = begin()
                    try:
                        item = next(passing)
                    except StopIteration:
                        return
                yield item
        finally:
            with self._reading:
                if passing is not None:
                    passing.close()
                if (turn, loads) == (self._turn, self._loads):
                    self.leave_all()

    def read_ahead(self) -> Iterator[tuple[Span, Sample_co]]:
        """Yield the rest of the epoch as places and samples; a sample counts only after `acknowledge`.

        For readers that read ahead of the training, or pack samples into sequences. They `acknowledge` what the training
        gets, and call `end_epoch` after the last sample. What the loop before has read and not acknowledged comes again.
        """
        self.leave_all()
        parts = self.parts()
        try:
            for part in parts:
                shard = -1
                for place, item in part.places():
                    if place.start // self._spec.shard != shard:
                        shard = place.start // self._spec.shard
                        self.note_reading(place)
                    try:
                        sample = self.source[item]
                    except InfrastructureError:
                        raise  # the source is away, and no sample is at fault
                    except Exception as error:  # noqa: BLE001 - whatever the source raises
                        self.fail(place, f"{type(error).__name__}: {error}")
                        continue
                    yield place, sample
        finally:
            parts.close()

    def acknowledge(self, places: Iterable[Span]) -> None:
        """Acknowledge samples: they have been handed to the training."""
        known = list(places)
        self._opened().acknowledge(known)
        if self._stream is not None:
            self._stream.acknowledge(len(known))

    def put_back(self, places: Iterable[Span]) -> None:
        """Put samples back; they are read again next."""
        known = [place for place in places if place.start < place.stop]
        if self._client is not None:
            self._client.put_back(known)
        if self._stream is not None:
            self._stream.put_back(len(known))

    def leave_all(self) -> None:
        """Put back all samples that were read and are not acknowledged."""
        if self._client is not None:
            self._client.leave_all()
        if self._stream is not None:
            self._stream.leave_all()

    def end_epoch(self) -> None:
        """Note that the training has all of this worker's samples of the epoch."""
        if self._stream is None:
            self.epoch += 1

    def until_end(self) -> Iterator[int]:
        """Yield the remaining epochs, for ``for epoch in data.until_end(): for sample in data: ...``."""
        self._opened()
        while not self._spec.epochs or self.epoch < self._spec.epochs:
            epoch, loads = self.epoch, self._loads
            yield epoch
            if (self.epoch, self._loads) == (epoch, loads):
                return  # the epoch was not read to its end
            self._opened()  # after a restore: the epoch to go on with

    def _usual_shard(self, size: int) -> int:
        fitting = shard_of(self._blocks) if self._blocks is not None else None
        return fitting or max(1, min(LARGEST, size // SHARDS))

    def parts(self) -> Generator[Part, None, None]:
        """Yield the samples of this epoch that this worker gets."""
        if not self._goes_on():
            return
        client = self._opened()
        client.enter(self.epoch)
        idle = self._stream.stream.idle if self._stream is not None else None
        while self._goes_on() and (spans := client.take(patient=self._patient, idle=idle)):
            try:
                for part in self._read(spans):
                    if part.items and not self._goes_on():
                        break
                    if not client.claim(part.span):
                        break
                    if part.items:
                        if self._stream is not None:
                            self._stream.draw()
                        yield part
                    else:
                        client.acknowledge([part.span])
            finally:
                client.leave_unclaimed()
        if self._stream is not None:
            client.rest()

    def _goes_on(self) -> bool:
        """Return whether a stream has another sample for this worker."""
        stream, spec = self._stream, self._spec
        return stream is None or stream.goes_on(spec, self._incarnation, patient=self._patient)

    def _read(self, spans: Sequence[Span]) -> Iterator[Part]:
        """Yield the samples of spans in parts; parts without samples are empty positions of a stream."""
        if self._stream is None:
            yield from map(Part, spans, self._orders.records_of(spans))
            return
        for span in spans:
            for place, message in self._stream.read(span):
                yield Part(place, () if message is None else (message,))

    def note_reading(self, place: Span) -> None:
        """Note the shard whose samples are read next, in case the process crashes on them."""
        if launched.reading is not None:
            launched.reading(data_key(self._spec.name), place.partition, place.start)

    def fail(self, place: Span, error: str) -> None:
        """Report that a sample cannot be read; the empty positions before it are acknowledged."""
        client, partition, position = self._opened(), place.partition, place.stop - 1
        client.acknowledge([Span(partition, place.start, position)])
        if self._stream is not None:
            self._stream.put_back(1)
        what = f"offset {position} of partition {partition}"
        if self._stream is None:
            what = f"record {self._orders.record(partition, position)}"
        client.fail(partition, position, f"{what}: {error}")

    def _opened(self) -> ShardClient:
        if os.getpid() != self._pid:
            raise ConfigurationError(
                "A process of a data loader cannot read the data set by itself; use data.loader(batch_size=..., "
                "num_workers=...) instead of DataLoader(data, ...)."
            )
        if self._closed:
            raise ConfigurationError(f"The data set {self._spec.name} was closed; make another.")
        if self._client is None:
            with self._reading:
                if self._client is None:
                    client = self._open()
                    self.epoch = max(self.epoch, client.first_epoch)
                    self._client = client
        return self._client

    @property
    def name(self) -> str:
        """The name of the data set in its job."""
        return self._spec.name

    def join(self, readers: Readers) -> None:
        """Read with others that start and end by themselves; call this before anything is read."""
        self._readers, self._base = readers, readers.base

    def flush(self) -> None:
        """Wait until the master knows all that is acknowledged."""
        if self._client is not None:
            self._client.flush()

    @property
    def _incarnation(self) -> Incarnation:
        if self._readers is not None:
            return self._readers.incarnation
        # Each call of a restartable function begins anew, also in ranks whose process has restored nothing before.
        return Incarnation(launched.given.round, (launched.call << CALL_BITS) + self._loads)

    def _refuse_another(self) -> None:
        """Refuse a data set while this process has another one of its name: the master would take them for one."""
        if not launched.given.relay:
            return
        name, mine = self._spec.name, self._incarnation
        if name in _OPENED:
            call, reference, incarnation = _OPENED[name]
            other = reference()
            in_use = call == launched.call and other is not None and not other._closed  # noqa: SLF001
            if other is not self and (in_use or incarnation == mine):
                raise ConfigurationError(
                    f"This program has already opened a data set with the name {name}; make it once, with"
                    " epochs= for several passes, or give each data set its own name=."
                )
        _OPENED[name] = launched.call, weakref.ref(self), mine

    def _open(self) -> ShardClient:
        self._refuse_another()
        given = launched.given
        if given.survive and given.attempt and not launched.call:
            # What the others have learned from, it would take again on its way to them, or from them.
            raise InfrastructureError(
                f"--survive: a rank cannot reach the others' place in the data set {self._spec.name}, whose samples the"
                " master deals; all ranks start again."
            )
        if self._stream is None:
            rank, _ = services.world()
            reader = self._readers.reader if self._readers is not None else None
            return ShardClient(
                self._spec, services.connect(), rank, self._incarnation, self._base, reader=reader
            )
        client = self._stream.open(self._spec, self._base, self._incarnation)
        self._spec = client.spec
        return client

    def close(self) -> None:
        """Return unread samples. Afterwards, iterating requires a restore."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()
        elif self._client is not None:
            self._client.close()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the samples acknowledged by this worker, as plain values of a few bytes per shard.

        Raises:
            InfrastructureError: the worker was cut off from the master for longer than ``timeout``.
        """
        rank, world_size = services.world()
        if services.serves():
            rank = NO_READER
        client, stream = self._client, self._stream
        acknowledged, settled = client.acknowledged() if client is not None else (b"", b"")
        return RankData(
            name=self._spec.name,
            size=self._spec.size,
            order=self._spec.order,
            rank=rank,
            world_size=world_size,
            epoch=self.epoch,
            base=self._base,
            acknowledged=acknowledged,
            settled=settled,
            incarnation=None if client is None else client.incarnation,
            begins=self._spec.begins,
            limits=self._spec.limits,
            source_ids=self._spec.source_ids,
            samples_before=0 if stream is None else stream.samples_before,
            samples=0 if stream is None else stream.samples,
        ).as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a single worker.

        Raises:
            ConfigurationError: there were several workers, or the state belongs to another dataset.
        """
        self.load_rank_states([state])

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all workers that saved; the number of workers may have changed.

        Raises:
            ConfigurationError: states are missing, or belong to another dataset.
            InfrastructureError: the states contradict each other.
        """
        known, epoch = merged(states, self._spec)
        self.close()
        self._client, self._closed = None, False
        self._base, self.epoch = known.packed(), epoch
        if self._stream is not None:
            first = began(states)
            self._spec = msgspec.structs.replace(
                self._spec, begins=first.begins, limits=first.limits, source_ids=first.source_ids
            )
            self._stream.restart(count(states))
        key = launched.call, self._spec.name
        self._loads = _LOADS[key] = _LOADS[key] + 1

    @property
    def commits(self) -> bool:
        """True if `commit_rank_states` is of use: for a group in the stream's address, or for a smaller state."""
        return self._has_group or (self._client is not None and self._client.spans > SETTLED)

    @property
    def _has_group(self) -> bool:
        return self._stream is not None and self._stream.has_group

    def commit_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Commit a stored checkpoint's offsets to the stream's group; ``states`` are those of all ranks.

        If they have become large, later states leave out what this checkpoint contains. A `Checkpointer` calls this in
        rank 0, in a thread of its own. Errors are logged.
        """
        if self._stream is not None and self._has_group:
            self._stream.commit(states, self._spec)
        client = self._client
        if client is None or client.spans <= SETTLED:
            return
        # A checkpoint of an earlier incarnation may contain what a restore has undone.
        if began_as(states) == {client.incarnation}:
            client.settle(merged(states, self._spec)[0].packed())


def acknowledged(states: Sequence[Mapping[str, Any]]) -> Spans:
    """Return the acknowledged samples in the states of all workers of one checkpoint, for inspection."""
    first = decoding.convert(dict(states[0]), RankData)
    spec = DataSpec(name=first.name, size=first.size, order=first.order)
    return merged(states, spec)[0]


def _checked(fields: dict[str, Any]) -> DataSpec:
    try:
        return decoding.convert(fields, DataSpec)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"Invalid options for a data set: {error}.") from error
