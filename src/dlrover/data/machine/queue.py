"""Queue of one dataset: a state machine that leases shards and knows each one's worker.

A sample is *taken* while it is leased to a worker, and *done* when the worker reports that it was handed to
the training. The checkpoint that contains its effect *acknowledges* it: each checkpoint holds the set of the
samples that its model has learned from. When workers restart, with or without a checkpoint, they open the
queue as a new incarnation with this set, and everything else that was taken or done is leased again. So the
data always match the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from dlrover.data.machine.lane import Lane, epoch_size, lanes_of
from dlrover.data.machine.spans import Spans
from dlrover.errors import ProtocolError
from dlrover.spec.shards import (
    DataSpec,
    ExtendShards,
    Failed,
    Incarnation,
    LookShards,
    OpenShards,
    SetAside,
    ShardReply,
    ShardRequest,
    Span,
    TakeShards,
)

TAIL = 2
"""A worker among several gets at most 1 / (``TAIL`` * number of workers) of the remaining samples, so that
all end at the same time."""
QUIET = 2
"""Workers report four times per timeout; if all are silent for 1 / ``QUIET`` of it, the dealer was down."""
FOUND = ("begins", "limits", "shard")
"""Fields that workers find in a broker, each worker at another moment."""
MAX_ASIDE = 1000
"""Maximum number of skipped spans that are listed with their error."""


class Answer(msgspec.Struct, frozen=True):
    """Command to answer the request."""

    reply: ShardReply


class Report(msgspec.Struct, frozen=True):
    """Command to report skipped samples."""

    data: str
    what: SetAside


Command: TypeAlias = Answer | Report


@dataclass
class Worker:
    """A worker of the current incarnation."""

    heard: float
    #: its leased samples that are not done; part of its lanes' ``taken``
    held: Spans = field(default_factory=Spans)
    #: the epoch that it reads, or reads next
    lane: int = 0
    #: number of its last `TakeShards`; -1 before the first
    seq: int = -1
    #: True if it waits and its last request got nothing
    starves: bool = False
    reply: ShardReply = field(default_factory=ShardReply)


@dataclass
class ShardQueue:
    """State of one dataset. Only `handle` changes it."""

    spec: DataSpec
    incarnation: Incarnation = field(default_factory=Incarnation)
    #: samples that were done when this incarnation began
    base: bytes = b""
    lanes: dict[int, Lane] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    #: dead or silent workers, whose shards went to others
    dropped: set[str] = field(default_factory=set)
    #: failed attempts to read a sample, by lane and position; only while attempts remain
    tries: dict[tuple[int, int], int] = field(default_factory=dict)
    aside: list[SetAside] = field(default_factory=list)
    #: crashes of workers while they read a shard, by its lane and first position
    deaths: dict[tuple[int, int], int] = field(default_factory=dict)
    #: shards that repeatedly crashed workers; the following incarnations skip them
    deadly: list[SetAside] = field(default_factory=list)
    #: the epoch in which this incarnation began
    first_lane: int = 0
    #: time of the last request
    last: float = 0.0
    _next_lane: int = 0
    _out: list[Command] = field(default_factory=list)

    @property
    def is_stream(self) -> bool:
        """True if the lanes are partitions."""
        return self.spec.size < 0

    # ---- inputs

    def handle(self, event: ShardRequest, now: float) -> list[Command]:
        """Handle one request at time ``now`` (seconds); return the resulting commands.

        Raises:
            ProtocolError: the request contradicts the known state; nothing has changed.
        """
        self._out = []
        if isinstance(event, LookShards):  # it changes nothing, so it is not journalled
            self._look()
            return self._out
        if now - self.last > self.spec.timeout / QUIET:
            self.forgive(now)
        self.last = max(self.last, now)
        if isinstance(event, OpenShards):
            self._open(event, now)
        elif isinstance(event, TakeShards):
            self._take(event, now)
        elif isinstance(event, ExtendShards):
            if event.incarnation != self.incarnation:
                raise ProtocolError(_begun_anew(event.data))
            self._extend(event)
        else:
            self._forget(event.worker)
        return self._out

    def _open(self, event: OpenShards, now: float) -> None:
        if event.incarnation < self.incarnation or event.worker in self.dropped:
            raise ProtocolError(_stale(event.worker, event.spec.name))
        if event.incarnation > self.incarnation:
            self._begin(event)
        if self._settled(event.spec) != self.spec:
            raise ProtocolError(_different(event.spec, self.spec))
        if event.done != self.base:
            raise ProtocolError(
                f"Worker {event.worker} has restored another checkpoint of the data set {self.spec.name} "
                "than the first worker; all must restore the same step."
            )
        self.workers.setdefault(event.worker, Worker(now, lane=self.first_lane)).heard = now
        spec = self.spec if self.is_stream else None
        self._answer(ShardReply(lane=self.first_lane, spec=spec))

    def _settled(self, spec: DataSpec) -> DataSpec:
        """Return a worker's description of the dataset; for a stream, with the first worker's findings."""
        if spec.size >= 0 or not self.is_stream:
            return spec
        mine = {name: getattr(self.spec, name) for name in FOUND}
        return msgspec.structs.replace(spec, **mine)

    def _begin(self, event: OpenShards) -> None:
        """Begin an incarnation: only the content of its checkpoint is done."""
        done = Spans.unpacked(event.done)
        # Without a checkpoint, a stream restarts where this job began, not at its current position.
        again = not done and self.spec.begins
        spec = self._settled(event.spec) if again else event.spec
        lanes = lanes_of(spec, done)
        self.spec, self.incarnation, self.base = spec, event.incarnation, event.done
        self.lanes = lanes
        self.workers, self.dropped, self.tries, self.aside = {}, set(), {}, []
        for deadly in self.deadly:
            place = deadly.span
            if place.lane not in lanes and not self.is_stream:
                lanes[place.lane] = Lane(0, epoch_size(spec))
            lanes[place.lane].leave_out(place.start, place.stop)
        self.aside = list(self.deadly)
        self._next_lane = 0
        self.first_lane = 0 if self.is_stream else self._first_open_lane()

    def _take(self, event: TakeShards, now: float) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or event.incarnation != self.incarnation:
            raise ProtocolError(_stale(event.worker, event.data))
        if event.seq < worker.seq:
            raise ProtocolError(
                f"Request {event.seq} of worker {event.worker} came after its request {worker.seq}: it is late,"
                " and nobody waits for its answer."
            )
        if event.seq == worker.seq:
            worker.heard = now
            self._answer(worker.reply)
            return
        self._check(event, worker)
        worker.heard, worker.seq, worker.lane = now, event.seq, event.lane
        for span in event.done:
            worker.held.remove(span)
            self.lanes[span.lane].finish(span.start, span.stop)
        for failure in event.failed:
            self._fail(worker, failure)
        for span in event.returned:
            worker.held.remove(span)
            self.lanes[span.lane].give_back(span.start, span.stop)
        if event.gap is not None and self.is_stream:
            self.lanes[event.gap.lane].leave_empty(event.gap.start, event.gap.stop)
        self._expire(now)
        spans = self._deal(worker, event)
        worker.starves = event.starving and not spans
        aside = tuple(report.what for report in self._out if isinstance(report, Report))
        worker.reply = msgspec.structs.replace(
            self._reply(event.lane, spans), aside=aside, others_starve=self._others_starve(worker)
        )
        self._answer(worker.reply)

    def _check(self, event: TakeShards, worker: Worker) -> None:
        if event.gap is not None and event.gap.lane not in self.lanes:
            raise ProtocolError(f"The data set {event.data} has no lane {event.gap.lane}.")
        seen = Spans()
        failed = (failure.span for failure in event.failed)
        for span in (*event.done, *event.returned, *failed):
            if not worker.held.covers(span) or seen.meets(span):
                raise ProtocolError(
                    f"Worker {event.worker} reports samples {span.start} to {span.stop} of lane {span.lane}"
                    f" of the data set {event.data}, which it has not taken."
                )
            seen.add(span)

    def _fail(self, worker: Worker, failure: Failed) -> None:
        span = failure.span
        worker.held.remove(span)
        lane, key = self.lanes[span.lane], (span.lane, span.start)
        self.tries[key] = self.tries.get(key, 0) + 1
        if self.tries[key] < self.spec.attempts:
            lane.give_back(span.start, span.stop)
            return
        del self.tries[key]
        lane.put_aside(span.start, span.stop)
        what = SetAside(span, failure.error)
        if len(self.aside) < MAX_ASIDE:
            self.aside.append(what)
        self._out.append(Report(self.spec.name, what))

    def _expire(self, now: float) -> None:
        """Give up workers that were silent for too long; they learn it from their next request."""
        limit = now - self.spec.timeout
        for name in [name for name, worker in self.workers.items() if worker.heard < limit]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        self.dropped.add(name)
        for span in worker.held:
            self.lanes[span.lane].give_back(span.start, span.stop)

    def crashed(self, rank: int, round_: int, place: tuple[int, int], how: str) -> list[Command]:
        """Count a crash as an attempt at the shard that the worker read at ``place`` (lane, position)."""
        self._out = []
        number, position = place
        lane = self.lanes.get(number)
        if round_ != self.incarnation.round or lane is None:
            return []
        first = position - position % self.spec.shard
        start, stop = max(lane.begin, first), min(lane.end, first + self.spec.shard)
        shard = Span(number, start, max(start, stop))
        for name, worker in self.workers.items():
            if name.startswith(f"{rank}-") and worker.held.meets(shard):
                self._blame(shard, how)
        return self._out

    def _blame(self, shard: Span, how: str) -> None:
        key = (shard.lane, shard.start)
        self.deaths[key] = self.deaths.get(key, 0) + 1
        if self.deaths[key] != self.spec.attempts:
            return
        what = SetAside(shard, f"{how}, {self.spec.attempts} times with them")
        self.deadly.append(what)
        self._out.append(Report(self.spec.name, what))

    def _extend(self, event: ExtendShards) -> None:
        if not self.is_stream or len(event.ends) != len(self.lanes):
            raise ProtocolError(
                f"The data set {event.data} has {len(self.lanes)} partitions that may grow, not"
                f" {len(event.ends)}."
            )
        for number, end in enumerate(event.ends):
            lane = self.lanes[number]
            limit = self.spec.limits[number] if self.spec.limits else end
            lane.end = max(lane.end, min(end, limit))
        self._answer(self._reply(0, ()))

    def _look(self) -> None:
        lane = 0 if self.is_stream else self._first_open_lane()
        reply = self._reply(lane, ())
        self._answer(msgspec.structs.replace(reply, lane=lane, aside=tuple(self.aside)))

    def forgive(self, now: float) -> None:
        """Restart the silence timeouts, because the dealer was down or stopped until ``now``.

        Silence of all workers means this, since each one reports more often.
        """
        self.last = now
        for worker in self.workers.values():
            worker.heard = max(worker.heard, now)

    # ---- leasing

    def _deal(self, worker: Worker, event: TakeShards) -> tuple[Span, ...]:
        spans: list[Span] = []
        lanes = self._open_lanes(event.lane)
        want = event.want
        if len(self.workers) > 1:
            left = sum(self.lanes[number].left for number in lanes)
            share = -(-left // (self.spec.shard * TAIL * len(self.workers)))
            if worker.held:
                share -= -(-worker.held.count // self.spec.shard)
            want = min(want, max(share, int(event.starving)))
        for number in lanes:
            dealt = 0
            for start, stop in self.lanes[number].deal(self.spec.shard, want):
                span = Span(number, start, stop)
                worker.held.add(span)
                spans.append(span)
                dealt += -(-(stop - start) // self.spec.shard)
            want -= dealt
            if want <= 0:
                break
        return tuple(spans)

    def _open_lanes(self, lane: int) -> Sequence[int]:
        """Return the lanes to lease from, in this order."""
        if self.is_stream:
            count = len(self.lanes)
            first = self._next_lane
            self._next_lane = (first + 1) % max(1, count)
            return [(first + number) % count for number in range(count)]
        if not self.spec.epochs or lane < self.spec.epochs:
            self._make_lane(lane)
        return [n for n in self._readable(lane) if not self.lanes[n].exhausted]

    def _readable(self, lane: int) -> list[int]:
        """Return the lanes for a reader of an epoch: its own, and earlier ones without readers.

        Samples returned in an epoch that still has a reader belong to that reader's loop.
        """
        earliest = min((worker.lane for worker in self.workers.values()), default=lane)
        return [n for n in sorted(self.lanes) if n == lane or n < min(earliest, lane)]

    def _make_lane(self, number: int) -> Lane:
        for earlier in range(number + 1):
            if earlier not in self.lanes:
                self.lanes[earlier] = Lane(0, epoch_size(self.spec))
        return self.lanes[number]

    def _first_open_lane(self) -> int:
        number = 0
        while number in self.lanes and self.lanes[number].exhausted:
            number += 1
        return number

    def _others_starve(self, worker: Worker) -> bool:
        """Return whether another worker needs the samples that this worker has not read yet."""
        others = (other for other in self.workers.values() if other is not worker)
        return self.is_stream and any(other.starves for other in others)

    # ---- answers

    def _reply(self, lane: int, spans: tuple[Span, ...]) -> ShardReply:
        if self.is_stream:
            of = readable = list(self.lanes.values())
            done = sum(lane.done.count for lane in of)
            taken = sum(lane.taken.count for lane in of)
        else:
            of = [self.lanes[n] for n in sorted(self.lanes) if n <= lane]
            readable = [self.lanes[n] for n in self._readable(lane)]
            last = self.lanes.get(lane)
            done = last.done.count if last else 0
            taken = last.taken.count if last else 0
        exhausted = all(lane.exhausted for lane in readable)
        complete = all(lane.complete for lane in of)
        return ShardReply(
            spans=spans, lane=lane, exhausted=exhausted, complete=complete, done=done, taken=taken
        )

    def _answer(self, reply: ShardReply) -> None:
        self._out.append(Answer(reply))

    # ---- invariants

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        held = Spans()
        for worker in self.workers.values():
            for span in worker.held:
                assert not held.meets(span), "two workers hold a sample"
                held.add(span)
        for number, lane in self.lanes.items():
            lane.validate()
            assert lane.taken == held.of(number), "what is taken is held by somebody"
        assert not self.dropped & self.workers.keys()
        assert all(0 < count < self.spec.attempts for count in self.tries.values())


def _stale(worker: str, data: str) -> str:
    return (
        f"The shards of worker {worker} of the data set {data} were dealt to others: it was silent for too "
        "long, or the workers have begun anew."
    )


def _begun_anew(data: str) -> str:
    return f"The workers that read the data set {data} have begun anew; this one is of an earlier round."


def _different(spec: DataSpec, first: DataSpec) -> str:
    for field_ in DataSpec.__struct_fields__:
        mine, theirs = getattr(spec, field_), getattr(first, field_)
        if mine != theirs:
            return (
                f"The data set {spec.name} has {field_} {mine!r} here and {theirs!r} for the first worker; "
                "all must give the same."
            )
    return ""
