"""What is said about a data set that is dealt out: by a training process, and by whoever deals.

The samples of a data set are *positions* in *lanes*. An epoch is a lane, and so is a partition of a stream.
Which record stands at a position is the reader's business: the dealer knows numbers only.
"""

from __future__ import annotations

import zlib
from typing import Annotated, TypeAlias

import msgspec

MAX_WANT = 1000
"""Shards in one request, at most."""
MAX_SPANS = 10_000
"""Spans in one message, at most."""
MAX_NAME = 200
MAX_ERROR = 2000
"""Characters of an error that are kept."""
MAX_DONE = 2 * 1024 * 1024
"""Bytes of the packed spans that a checkpoint contains, at most."""
MAX_LANES = 10_000
"""Partitions of a stream, at most."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Number = Annotated[int, msgspec.Meta(ge=0)]


def data_key(name: str) -> int:
    """A number above 0 for a data set's name, where no name fits; hardly ever the same for two of a job."""
    return zlib.crc32(name.encode()) + 1


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The positions from ``start`` up to ``stop``, which is not one of them."""

    lane: _Number
    start: _Number
    stop: _Number


class DataSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A data set, the same for everybody who reads it."""

    name: _Name
    size: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Samples in an epoch; -1: it is a stream, whose lanes grow."""
    epochs: _Number = 1
    """How often each sample is dealt; 0: endlessly. A stream has no epochs."""
    begins: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_LANES)] = ()
    """The first offset of each partition of a stream. What the first worker found stands for all."""
    limits: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_LANES)] = ()
    """Where each partition of a stream ends for this job, as the first worker found; empty: nowhere."""
    shard: Annotated[int, msgspec.Meta(ge=1)] = 1000
    """Samples in a shard."""
    drop_last: bool = False
    """Leave the incomplete last shard of each epoch out."""
    order: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    """How positions become records: text that is the same for everybody who reads it in the same way."""
    attempts: Annotated[int, msgspec.Meta(ge=1)] = 3
    """How often a sample may fail until it is set aside."""
    max_aside: _Number = 10
    """Samples that a worker may set aside before it gives up."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
    """Seconds of silence after which a worker's shards are dealt to others."""


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """Samples that could not be read."""

    span: Span
    error: Annotated[str, msgspec.Meta(max_length=MAX_ERROR)]


class Incarnation(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What a restart or a restored checkpoint adds to: workers of an earlier one are dead to the dealer."""

    round: int = 0
    loads: int = 0
    """Checkpoints that the workers of the round have restored."""


_Spans = Annotated[tuple[Span, ...], msgspec.Meta(max_length=MAX_SPANS)]
_Failures = Annotated[tuple[Failed, ...], msgspec.Meta(max_length=MAX_WANT)]


class OpenShards(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """A worker begins to read. The first one of an incarnation says what its checkpoint contains."""

    spec: DataSpec
    worker: _Name
    incarnation: Incarnation
    done: Annotated[bytes, msgspec.Meta(max_length=MAX_DONE)] = b""
    """What the model has learned from already: `dlrover.sharding.spans.Spans`, packed."""


class TakeShards(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """A worker tells what it has done, and asks for more. With the ``seq`` of its last one: a repetition."""

    data: _Name
    worker: _Name
    incarnation: Incarnation
    seq: _Number
    lane: _Number = 0
    """The epoch that it reads, or will read next; it gets shards of earlier ones that nobody reads, first."""
    want: Annotated[int, msgspec.Meta(ge=0, le=MAX_WANT)] = 0
    """Shards, at most; it gets fewer when few are left."""
    done: _Spans = ()
    failed: _Failures = ()
    starving: bool = False
    """It waits, and needs one more whatever it has: perhaps to fill a batch."""
    gap: Span | None = None
    """Positions of a stream where nothing is, as it has found: they are dealt as one shard."""
    returned: _Spans = ()
    """What it has taken, and leaves to others."""


class ExtendShards(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """The partitions of a stream now end at these offsets."""

    data: _Name
    incarnation: Incarnation
    ends: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_LANES)]


class ForgetWorker(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """A worker is dead, and what it has not done goes to others. What it has done stays done."""

    worker: _Name


class LookShards(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Ask how far the reading of a data set is."""

    data: _Name


ShardRequest: TypeAlias = OpenShards | TakeShards | ExtendShards | ForgetWorker | LookShards


class SetAside(msgspec.Struct, frozen=True, array_like=True):
    """Samples that nobody could read."""

    span: Span
    error: str


class ShardReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The answer to each request."""

    spans: tuple[Span, ...] = ()
    """What the worker may read now, in this order; each is one shard or several that follow each other."""
    lane: int = 0
    """After opening: the first epoch of which something is left."""
    exhausted: bool = False
    """Nothing is left to take of this epoch; others may still read what they have taken."""
    complete: bool = False
    """Everything of this epoch is done or set aside."""
    done: int = 0
    """Samples done of this epoch, or of all partitions."""
    taken: int = 0
    """The same for samples that somebody has taken."""
    aside: tuple[SetAside, ...] = ()
    """What was set aside by this request; everything that was, for `LookShards`."""
    refused: str = ""
    """Why the request was refused; asking again would not help."""
    away: str = ""
    """Why nobody could be asked; ask again."""
    others_starve: bool = False
    """Nothing of the stream is left to take, and another worker waits for it."""
    spec: DataSpec | None = None
    """After opening a stream: what the first worker found of it, which stands for all."""
