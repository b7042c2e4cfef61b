"""Queue of one dataset: a state machine that leases shards and knows each one's worker.

A sample is *leased* while a worker holds it, and *acknowledged* when the worker reports that it was handed to
the training. Each checkpoint holds the set of
the acknowledged samples, whose effect its model has. When workers restart, with or without a checkpoint, they open the
queue as a new incarnation with this set, and everything else that was leased or acknowledged is leased again. So the
data always match the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from dlrover.data.machine.partition import Partition, Totals, epoch_size, partitions_of
from dlrover.data.machine.spans import Spans
from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.spec.requests.shards import (
    MAX_SETTLED,
    DataSpec,
    ExtendShards,
    FailedSpan,
    Incarnation,
    LookShards,
    OpenShards,
    SettleShards,
    ShardReply,
    ShardRequest,
    Skipped,
    Span,
    TakeShards,
)

TAIL = 2
"""A worker among several gets at most 1 / (``TAIL`` * number of workers) of the remaining samples, so that
all end at the same time."""
QUIET = 2
"""Workers report four times per timeout; if all are silent for 1 / ``QUIET`` of it, the master was down."""
FOUND = ("begins", "limits", "source_ids", "shard")
"""Fields that workers find in a broker, each worker at another moment."""
MAX_AHEAD = 1000
"""Maximum number of epochs that one request begins; a worker reads one after the other."""
MAX_SKIPPED = 1000
"""Maximum number of skipped spans that are listed with their error."""


class Answer(msgspec.Struct, frozen=True):
    """Command to answer the request."""

    reply: ShardReply


class ReportSkipped(msgspec.Struct, frozen=True):
    """Command to report skipped samples."""

    data: str
    what: Skipped


Command: TypeAlias = Answer | ReportSkipped


@dataclass
class ShardWorker:
    """A worker of the current incarnation."""

    heard: float
    #: its leased samples that are not acknowledged; part of its partitions' ``leased``
    held: Spans = field(default_factory=Spans)
    #: the epoch that it reads, or reads next
    epoch: int = 0
    #: number of its last `TakeShards`; -1 before the first
    seq: int = -1
    #: what it knows to be settled
    settled: bytes = b""
    reply: ShardReply = field(default_factory=ShardReply)


@dataclass
class ShardQueue:
    """State of one dataset. Only `handle` changes it."""

    spec: DataSpec
    incarnation: Incarnation = field(default_factory=Incarnation)
    #: samples that were acknowledged when this incarnation began
    base: bytes = b""
    #: samples that a stored checkpoint of this incarnation contains, so that no worker has to save them as its own
    settled: bytes = b""
    partitions: dict[int, Partition] = field(default_factory=dict)
    workers: dict[str, ShardWorker] = field(default_factory=dict)
    #: number of workers by epoch that they read; a search among thousands for each request would take too long
    readers: Counter[int] = field(default_factory=Counter)
    #: workers that wait and whose last request got nothing
    starving: set[str] = field(default_factory=set)
    #: no worker was heard last before this time
    heard: float = -math.inf
    #: dead or silent workers, whose shards went to others
    dropped: set[str] = field(default_factory=set)
    #: failed attempts to read a sample, by partition and position; only while attempts remain
    tries: dict[tuple[int, int], int] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    #: crashes of workers while they read a shard, by its partition and first position
    deaths: dict[tuple[int, int], int] = field(default_factory=dict)
    #: shards that repeatedly crashed workers; the following incarnations skip them
    deadly: list[Skipped] = field(default_factory=list)
    #: the epoch in which this incarnation began
    first_epoch: int = 0
    #: time of the last request
    last: float = 0.0
    #: all samples of lower epochs are acknowledged, without a partition here, or are acknowledged or skipped
    finished: int = 0
    #: of a stream: sums over its partitions, which change by them only
    totals: Totals = field(default_factory=lambda: Totals({}), compare=False)
    _next_partition: int = 0
    _out: list[Command] = field(default_factory=list, compare=False)

    @property
    def is_stream(self) -> bool:
        """True for a stream; otherwise each partition is an epoch."""
        return self.spec.size < 0

    # ---- inputs

    def handle(self, event: ShardRequest, now: float) -> list[Command]:
        """Handle one request at time ``now`` (seconds); return the resulting commands.

        Raises:
            ProtocolError: the request contradicts the known state; nothing has changed.
            ConfigurationError: the worker describes the dataset in another way than the first worker.
        """
        self._out = []
        if isinstance(event, LookShards):  # it changes nothing, so it is not journalled
            self._look()
            return self._out
        if now - self.last > self.spec.timeout / QUIET:
            self.forgive(now)
        self.last = max(self.last, now)
        self.heard = min(self.heard, now)
        if isinstance(event, OpenShards):
            self._open(event, now)
        elif isinstance(event, TakeShards):
            self._take(event, now)
        elif isinstance(event, ExtendShards):
            if event.incarnation != self.incarnation:
                raise ProtocolError(_begun_anew(event.data))
            self._extend(event)
        elif isinstance(event, SettleShards):
            self._settle(event)
        else:
            self._forget(event.worker)
        return self._out

    def _open(self, event: OpenShards, now: float) -> None:
        if event.incarnation < self.incarnation or event.worker in self.dropped:
            raise ProtocolError(_stale(event.worker, event.spec.name))
        ends, begins = len(event.spec.limits), len(event.spec.begins)
        if ends and ends != begins:
            raise ConfigurationError(
                f"The data set {event.spec.name} has limits of {ends} partitions and begins of {begins}; both must be of"
                " all partitions."
            )
        if event.incarnation > self.incarnation:
            self._begin(event)
        if self._settled(event.spec) != self.spec:
            raise ConfigurationError(_different(event.spec, self.spec))
        if event.acknowledged != self.base:
            raise ProtocolError(
                f"Worker {event.worker} has restored another checkpoint of the data set {self.spec.name} "
                "than the first worker; all must restore the same step."
            )
        worker = self.workers.get(event.worker)
        if worker is None:
            worker = self.workers[event.worker] = ShardWorker(now, epoch=self.first_epoch)
            self.readers[worker.epoch] += 1
        worker.heard = now
        spec = self.spec if self.is_stream else None
        self._answer(ShardReply(epoch=self.first_epoch, spec=spec))

    def _settled(self, spec: DataSpec) -> DataSpec:
        """Return a worker's description of the dataset; for a stream, with the first worker's findings."""
        if spec.size >= 0 or not self.is_stream:
            return spec
        mine = {name: getattr(self.spec, name) for name in FOUND}
        return msgspec.structs.replace(spec, **mine)

    def _begin(self, event: OpenShards) -> None:
        """Begin an incarnation: only the content of its checkpoint is acknowledged."""
        acknowledged = Spans.unpacked(event.acknowledged)
        # Without a checkpoint, a stream restarts where this job began, not at its current position.
        again = not acknowledged and self.spec.begins
        spec = self._settled(event.spec) if again else event.spec
        partitions = partitions_of(spec, acknowledged)
        self.spec, self.incarnation, self.base = spec, event.incarnation, event.acknowledged
        self.settled = b""
        self.partitions = partitions
        self.workers, self.dropped, self.tries, self.skipped = {}, set(), {}, []
        self.readers.clear()
        self.starving.clear()
        for deadly in self.deadly:
            place = deadly.span
            if place.partition not in partitions and not self.is_stream:
                partitions[place.partition] = Partition(0, epoch_size(spec))
            partitions[place.partition].leave_out(place.start, place.stop)
        self.skipped = list(self.deadly)
        self.totals = Totals(partitions if self.is_stream else {})
        self._next_partition, self.finished = 0, 0
        self._finish_epochs()
        self.first_epoch = 0 if self.is_stream else self._first_open_epoch()

    def _take(self, event: TakeShards, now: float) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or event.incarnation != self.incarnation:
            raise ProtocolError(_stale(event.worker, event.data))
        if event.seq < worker.seq:
            raise ProtocolError(
                f"Request {event.seq} of worker {event.worker} came after its request {worker.seq}: it is late."
                " No call waits for its answer."
            )
        if event.seq == worker.seq:
            worker.heard = now
            self._answer(worker.reply)
            return
        self._check(event, worker)
        worker.heard, worker.seq = now, event.seq
        self._leave_epoch(worker)
        worker.epoch = event.epoch
        self.readers[worker.epoch] += 1
        for span in event.acknowledged:
            worker.held.remove(span)
            self._changing(span.partition).acknowledge(span.start, span.stop)
        for failure in event.failed:
            self._fail(worker, failure)
        for span in event.returned:
            worker.held.remove(span)
            self._changing(span.partition).give_back(span.start, span.stop)
        if event.gap is not None and self.is_stream:
            self.partitions[event.gap.partition].leave_empty(event.gap.start, event.gap.stop)
        self._finish_epochs()
        self._expire(now)
        spans = self._lease(worker, event)
        starves = event.starving and not spans
        (self.starving.add if starves else self.starving.discard)(event.worker)
        skipped = tuple(report.what for report in self._out if isinstance(report, ReportSkipped))
        worker.reply = msgspec.structs.replace(
            self._reply(event.epoch, spans),
            skipped=skipped,
            others_starve=self._others_starve(event.worker),
            settled=b"" if worker.settled == self.settled else self.settled,
        )
        worker.settled = self.settled
        self._answer(worker.reply)

    def _check(self, event: TakeShards, worker: ShardWorker) -> None:
        if event.gap is not None and event.gap.partition not in self.partitions:
            raise ProtocolError(
                f"The data set {event.data} has no partition {event.gap.partition}."
            )
        if not self.is_stream and self._is_dealt(event.epoch):
            last = max([self.finished - 1, *self.partitions]) + MAX_AHEAD
            if event.epoch > last:
                raise ProtocolError(
                    f"Worker {event.worker} reads epoch {event.epoch} of the data set {event.data}; epochs up to {last}"
                    " are accepted now."
                )
        seen = Spans()
        failed = (failure.span for failure in event.failed)
        for span in (*event.acknowledged, *event.returned, *failed):
            if not worker.held.covers(span) or seen.meets(span):
                raise ProtocolError(
                    f"Worker {event.worker} reports samples {span.start} to {span.stop} of partition {span.partition}"
                    f" of the data set {event.data}, which it does not hold."
                )
            seen.add(span)

    def _fail(self, worker: ShardWorker, failure: FailedSpan) -> None:
        span = failure.span
        worker.held.remove(span)
        partition, key = self._changing(span.partition), (span.partition, span.start)
        self.tries[key] = self.tries.get(key, 0) + 1
        if self.tries[key] < self.spec.attempts:
            partition.give_back(span.start, span.stop)
            return
        del self.tries[key]
        partition.skip(span.start, span.stop)
        what = Skipped(span, failure.error)
        if len(self.skipped) < MAX_SKIPPED:
            self.skipped.append(what)
        self._out.append(ReportSkipped(self.spec.name, what))

    def _expire(self, now: float) -> None:
        """Give up workers that were silent for too long; they learn it from their next request."""
        limit = now - self.spec.timeout
        if limit <= self.heard:
            return
        for name in [name for name, worker in self.workers.items() if worker.heard < limit]:
            self._forget(name)
        self.heard = min((worker.heard for worker in self.workers.values()), default=now)

    def _forget(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        self.dropped.add(name)
        self.starving.discard(name)
        self._leave_epoch(worker)
        for span in worker.held:
            self._changing(span.partition).give_back(span.start, span.stop)

    def _leave_epoch(self, worker: ShardWorker) -> None:
        self.readers[worker.epoch] -= 1
        if not self.readers[worker.epoch]:
            del self.readers[worker.epoch]

    def crashed(self, rank: int, round_: int, place: tuple[int, int], how: str) -> list[Command]:
        """Count a crash as an attempt at the shard that the worker read at ``place`` (partition, position)."""
        self._out = []
        number, position = place
        partition = self.partitions.get(number)
        if round_ != self.incarnation.round or partition is None:
            return []
        first = position - position % self.spec.shard
        start, stop = max(partition.begin, first), min(partition.end, first + self.spec.shard)
        shard = Span(number, start, max(start, stop))
        for name, worker in self.workers.items():
            if name.startswith(f"{rank}-") and worker.held.meets(shard):
                self._blame(shard, how)
        return self._out

    def _blame(self, shard: Span, how: str) -> None:
        key = (shard.partition, shard.start)
        self.deaths[key] = self.deaths.get(key, 0) + 1
        if self.deaths[key] != self.spec.attempts:
            return
        what = Skipped(shard, f"{how}, {self.spec.attempts} times with them")
        self.deadly.append(what)
        self._out.append(ReportSkipped(self.spec.name, what))

    def _extend(self, event: ExtendShards) -> None:
        if not self.is_stream or len(event.ends) != len(self.partitions):
            raise ProtocolError(
                f"The data set {event.data} has {len(self.partitions)} partitions that may grow, not"
                f" {len(event.ends)}."
            )
        for number, end in enumerate(event.ends):
            limit = self.spec.limits[number] if self.spec.limits else end
            if self.partitions[number].end < min(end, limit):
                self._changing(number).end = min(end, limit)
        self._answer(self._reply(0, ()))

    def _settle(self, event: SettleShards) -> None:
        if event.incarnation != self.incarnation:
            raise ProtocolError(_begun_anew(event.data))
        settled = Spans.unpacked(
            self.settled
        )  # workers have left it out, also if this checkpoint is an older one
        for span in Spans.unpacked(event.acknowledged):
            settled.add(span)
        packed = settled.packed()
        if len(packed) <= MAX_SETTLED:
            self.settled = packed
        self._answer(ShardReply())

    def _look(self) -> None:
        epoch = 0 if self.is_stream else self._first_open_epoch()
        reply = self._reply(epoch, ())
        size = epoch_size(self.spec)
        known = Spans(Span(number, 0, size) for number in range(self.finished))
        known.partitions |= {n: partition.acknowledged for n, partition in self.partitions.items()}
        self._answer(
            msgspec.structs.replace(reply, skipped=tuple(self.skipped), packed=known.packed())
        )

    def forgive(self, now: float) -> None:
        """Restart the silence timeouts, because the master was down or stopped until ``now``.

        Silence of all workers means this, since each one reports more often.
        """
        self.last = now
        for worker in self.workers.values():
            worker.heard = max(worker.heard, now)

    # ---- leasing

    def _lease(self, worker: ShardWorker, event: TakeShards) -> tuple[Span, ...]:
        spans: list[Span] = []
        partitions = self._open_partitions(event.epoch)
        want = event.want
        if len(self.workers) > 1:
            of = self.partitions
            left = self.totals.left if self.is_stream else sum(of[n].left for n in partitions)
            share = -(-left // (self.spec.shard * TAIL * len(self.workers)))
            if worker.held:
                share -= -(-worker.held.count // self.spec.shard)
            want = min(want, max(share, int(event.starving)))
        for number in partitions:
            leased = 0
            for start, stop in self._changing(number).lease(self.spec.shard, want):
                span = Span(number, start, stop)
                worker.held.add(span)
                spans.append(span)
                leased += -(-(stop - start) // self.spec.shard)
            want -= leased
            if want <= 0:
                break
        return tuple(spans)

    def _changing(self, number: int) -> Partition:
        """Return a partition that is to be changed."""
        return self.totals.change(number) if self.is_stream else self.partitions[number]

    def _open_partitions(self, epoch: int) -> Iterable[int]:
        """Return the partitions to lease from, in this order."""
        if self.is_stream:
            first = self._next_partition
            self._next_partition = (first + 1) % max(1, len(self.partitions))
            return self.totals.update().open_from(first)
        if self._is_dealt(epoch):
            self._make_epoch(epoch)
        return [n for n in self._readable(epoch) if not self.partitions[n].exhausted]

    def _is_dealt(self, epoch: int) -> bool:
        return not self.spec.epochs or epoch < self.spec.epochs

    def _readable(self, epoch: int) -> list[int]:
        """Return the epochs to lease from to a reader of ``epoch``: its own, and earlier ones without readers.

        Samples returned in an epoch that still has a reader belong to that reader's loop.
        """
        earliest = min(self.readers, default=epoch)
        return [n for n in sorted(self.partitions) if n == epoch or n < min(earliest, epoch)]

    def _make_epoch(self, number: int) -> None:
        for earlier in range(self.finished, number + 1):
            if earlier not in self.partitions:
                self.partitions[earlier] = Partition(0, epoch_size(self.spec))

    def _finish_epochs(self) -> None:
        """Keep no partitions of epochs that are over, so that no request takes longer after many epochs."""
        while not self.is_stream and (partition := self.partitions.get(self.finished)) is not None:
            if not partition.complete:
                return
            if not partition.skipped:
                del self.partitions[self.finished]
            self.finished += 1

    def _first_open_epoch(self) -> int:
        number = self.finished
        while number in self.partitions and self.partitions[number].exhausted:
            number += 1
        return number

    def _others_starve(self, worker: str) -> bool:
        """Return whether another worker needs the samples that this worker has not read yet."""
        return self.is_stream and len(self.starving) > (worker in self.starving)

    # ---- answers

    def _reply(self, epoch: int, spans: tuple[Span, ...]) -> ShardReply:
        if self.is_stream:
            totals = self.totals.update()
            acknowledged, leased = totals.acknowledged, totals.leased
            exhausted = not totals.open
            complete = exhausted and not leased
        else:
            of = [self.partitions[n] for n in sorted(self.partitions) if n <= epoch]
            last = self.partitions.get(epoch)
            over = epoch_size(self.spec) if epoch < self.finished else 0
            acknowledged = last.acknowledged.count if last else over
            leased = last.leased.count if last else 0
            exhausted = all(self.partitions[n].exhausted for n in self._readable(epoch))
            complete = all(partition.complete for partition in of)
        return ShardReply(
            spans=spans,
            epoch=epoch,
            exhausted=exhausted,
            complete=complete,
            acknowledged=acknowledged,
            leased=leased,
        )

    def _answer(self, reply: ShardReply) -> None:
        self._out.append(Answer(reply))

    # ---- invariants

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        self.totals.validate()
        held = Spans()
        for worker in self.workers.values():
            for span in worker.held:
                assert not held.meets(span), "two workers hold a sample"
                held.add(span)
        for number, partition in self.partitions.items():
            partition.validate()
            assert partition.leased == held.of(number), "leased samples without a worker"
        assert not self.dropped & self.workers.keys()
        assert self.readers == Counter(worker.epoch for worker in self.workers.values())
        assert self.starving <= self.workers.keys(), "a worker that has gone waits"
        assert all(worker.heard >= self.heard for worker in self.workers.values())
        assert all(
            p.complete and p.skipped for n, p in self.partitions.items() if n < self.finished
        )
        assert all(0 < count < self.spec.attempts for count in self.tries.values())


def _stale(worker: str, data: str) -> str:
    return (
        f"The shards of worker {worker} of the data set {data} were leased to others: it was silent for too "
        "long, or the workers have started again."
    )


def _begun_anew(data: str) -> str:
    return f"The workers that read the data set {data} have started again; this one is of an earlier round."


def _different(spec: DataSpec, first: DataSpec) -> str:
    for field_ in DataSpec.__struct_fields__:
        mine, theirs = getattr(spec, field_), getattr(first, field_)
        if mine != theirs:
            return (
                f"The data set {spec.name} has {field_} {mine!r} here and {theirs!r} for the first worker; all must"
                " give the same, and another data set another name=."
            )
    return ""
