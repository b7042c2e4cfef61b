"""Messages about a sharded dataset, between a training process and its service, which leases shards.

The samples of a dataset are *positions* in *partitions*. Each epoch of a dataset is one, and so
is each partition of a stream.
Only the reader knows which record stands at a position; the service knows numbers only.
"""

from __future__ import annotations

import zlib
from typing import Annotated, TypeAlias

import msgspec

MAX_WANT = 1000
"""Maximum number of shards in one request."""
MAX_SPANS = 10_000
"""Maximum number of spans in one message."""
MAX_NAME = 200
MAX_ERROR = 2000
"""Characters of an error that are kept."""
MAX_ACKNOWLEDGED = 2 * 1024 * 1024
"""Maximum bytes of the packed spans in a checkpoint."""
MAX_SETTLED = 256 * 1024
"""Maximum bytes of the packed spans that a reply repeats to each worker."""
MAX_PARTITIONS = 10_000
"""Maximum number of partitions in a stream."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Number = Annotated[int, msgspec.Meta(ge=0)]


def data_key(name: str) -> int:
    """Return a number above 0 that identifies a dataset where its name does not fit; collisions are rare."""
    return zlib.crc32(name.encode()) + 1


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The positions from ``start`` up to, and without, ``stop``."""

    partition: _Number
    start: _Number
    stop: _Number


class DataSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a dataset, equal for all of its readers."""

    name: _Name
    size: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Samples in an epoch; -1: a stream, whose partitions grow."""
    epochs: _Number = 1
    """Number of times that each sample is leased; 0: endlessly. A stream has no epochs."""
    begins: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_PARTITIONS)] = ()
    """First offset of each partition of a stream. The first worker's finding holds for all."""
    limits: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_PARTITIONS)] = ()
    """End of each partition of a stream for this job, as the first worker found; empty: no end."""
    source_ids: dict[str, str] = {}
    """By name, what tells a topic or stream from one that is created later, as the first worker found."""
    shard: Annotated[int, msgspec.Meta(ge=1)] = 1000
    """Samples in a shard."""
    drop_last: bool = False
    """Leave out the incomplete last shard of each epoch."""
    order: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    """Mapping of positions to records: a text that is equal for all readers with the same mapping."""
    attempts: Annotated[int, msgspec.Meta(ge=1)] = 3
    """Failed attempts to read a sample after which it is skipped."""
    max_skipped: _Number = 10
    """Maximum number of samples that a worker may skip before it gives up."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
    """Seconds of silence after which a worker's shards are leased to others."""


class FailedSpan(msgspec.Struct, frozen=True, array_like=True):
    """Samples that could not be read."""

    span: Span
    error: Annotated[str, msgspec.Meta(max_length=MAX_ERROR)]


class Incarnation(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One run of the readers; a restart or a restored checkpoint begins a new one and ends earlier ones."""

    round: int = 0
    loads: int = 0
    """Checkpoints that the workers of the round have restored."""


_Spans = Annotated[tuple[Span, ...], msgspec.Meta(max_length=MAX_SPANS)]
_Failures = Annotated[tuple[FailedSpan, ...], msgspec.Meta(max_length=MAX_WANT)]


class OpenShards(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Start of a worker's reading. The first worker of an incarnation reports its checkpoint's content."""

    spec: DataSpec
    worker: _Name
    incarnation: Incarnation
    acknowledged: Annotated[bytes, msgspec.Meta(max_length=MAX_ACKNOWLEDGED)] = b""
    """Samples that the model has already learned from: `dlrover.data.machine.spans.Spans`, packed."""


class TakeShards(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """Report of what a worker acknowledges, and request for more. A repeated ``seq`` marks a repetition."""

    data: _Name
    worker: _Name
    incarnation: Incarnation
    seq: _Number
    epoch: _Number = 0
    """The epoch that it reads, or will read next. Shards of earlier epochs without readers come first."""
    want: Annotated[int, msgspec.Meta(ge=0, le=MAX_WANT)] = 0
    """Maximum number of shards; the worker gets fewer when few are left."""
    acknowledged: _Spans = ()
    failed: _Failures = ()
    starving: bool = False
    """True if it waits and needs one more shard whatever it has, perhaps to fill a batch."""
    gap: Span | None = None
    """Empty positions that it found in a stream; they are leased as one shard."""
    returned: _Spans = ()
    """Leased samples that it gives back for others."""

    def __post_init__(self) -> None:
        """Refuse spans without samples, which no worker holds."""
        failed = (failure.span for failure in self.failed)
        for span in (*self.acknowledged, *self.returned, *failed):
            if span.start >= span.stop:
                raise ValueError(
                    f"Worker {self.worker} reports samples {span.start} to {span.stop} of partition {span.partition};"
                    " the end must be above the start."
                )


class ExtendShards(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """New end offsets of a stream's partitions."""

    data: _Name
    incarnation: Incarnation
    ends: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_PARTITIONS)]


class ForgetWorker(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Death of a worker. Its unfinished samples go to others; what it acknowledged stays so."""

    worker: _Name


class SettleShards(msgspec.Struct, frozen=True, array_like=True, tag="settle"):
    """What a stored checkpoint of this incarnation contains. No worker needs to save its own part of it any more."""

    data: _Name
    incarnation: Incarnation
    acknowledged: Annotated[bytes, msgspec.Meta(max_length=MAX_SETTLED)]
    """Samples that the model has learned from: `dlrover.data.machine.spans.Spans`, packed."""


class LookShards(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Request for the reading progress of a dataset."""

    data: _Name


ShardRequest: TypeAlias = (
    OpenShards | TakeShards | ExtendShards | SettleShards | ForgetWorker | LookShards
)


class Skipped(msgspec.Struct, frozen=True, array_like=True):
    """Samples that no worker could read."""

    span: Span
    error: str


class ShardReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="shards"):
    """The answer to each request."""

    spans: tuple[Span, ...] = ()
    """Samples that the worker may read now, in order; each span is one or several consecutive shards."""
    epoch: int = 0
    """After opening: the first epoch with samples left."""
    exhausted: bool = False
    """True if nothing of this epoch is left to lease; others may still read their shards."""
    complete: bool = False
    """True if everything of this epoch is acknowledged or skipped."""
    acknowledged: int = 0
    """Samples acknowledged of this epoch, or of all partitions."""
    leased: int = 0
    """Samples leased of this epoch, or of all partitions."""
    skipped: tuple[Skipped, ...] = ()
    """Samples that this request caused to be skipped; for `LookShards`, all skipped samples."""
    others_starve: bool = False
    """True if nothing of the stream is left to lease and another worker waits for it."""
    spec: DataSpec | None = None
    """After opening a stream: what the first worker found, which holds for all."""
    packed: bytes = b""
    """For `LookShards`: all acknowledged samples, as `dlrover.data.machine.spans.Spans` packs them."""
    settled: bytes = b""
    """What `SettleShards` has reported, if the worker has not got it yet."""
