"""Whatever happens, a model in the end has learned from every sample of every epoch exactly once."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.data.machine.datasets import Shards
from dlrover.data.machine.queue import Answer, Command, ReportSkipped
from dlrover.data.machine.spans import Spans
from dlrover.data.machine.state import RankData, merged
from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.requests.shards import (
    DataSpec,
    ExtendShards,
    FailedSpan,
    ForgetWorker,
    Incarnation,
    LookShards,
    OpenShards,
    SettleShards,
    ShardReply,
    ShardRequest,
    Span,
    TakeShards,
    data_key,
)

TIMEOUT = 100.0


@dataclass
class Rank:
    """A worker: what it has taken, handed to the model, and not yet reported."""

    name: str
    heard: float
    seq: int = 0
    epoch: int = 0
    held: list[Span] = field(default_factory=list)
    mine: Spans = field(default_factory=Spans)
    settled: bytes = b""
    done: Spans = field(default_factory=Spans)
    failed: list[FailedSpan] = field(default_factory=list)
    returned: list[Span] = field(default_factory=list)
    exhausted: bool = False


class Job:
    """Workers, their service with its journal, the model, and its checkpoints."""

    def __init__(self, spec: DataSpec, bad: frozenset[tuple[int, int]] = frozenset()) -> None:
        self.spec, self.bad = spec, bad
        self.now = 0.0
        self.shards = Shards()
        self.journal: list[tuple[ShardRequest, float]] = []
        self.model: Counter[tuple[int, int]] = Counter()
        self.skipped: Counter[tuple[int, int]] = Counter()
        self.checkpoints: list[tuple[Counter[tuple[int, int]], list[dict]]] = []
        self.earlier = 0
        """How many checkpoints are of earlier rounds."""
        self.ends = list(spec.begins)
        self.round = 0
        self.ranks: list[Rank] = []
        self.torn = False
        self.begin(3, None)

    @property
    def stream(self) -> bool:
        return self.spec.size < 0

    def ask(self, request: ShardRequest) -> ShardReply:
        self.journal.append((request, self.now))
        commands = self.shards.handle(request, self.now)
        self.shards.validate()
        for command in commands:
            if isinstance(command, ReportSkipped):
                span = command.what.span
                self.skipped.update((span.partition, n) for n in range(span.start, span.stop))
        return next(c.reply for c in commands if isinstance(c, Answer))

    # ---- what may happen

    def begin(self, count: int, checkpoint: int | None) -> None:
        """A new round: all workers go on from one checkpoint."""
        base, self.model = b"", Counter()
        if checkpoint is not None:
            model, states = self.checkpoints[checkpoint]
            base, self.model = merged(states, self.spec)[0].packed(), Counter(model)
        self.skipped.clear()
        self.earlier = len(self.checkpoints)
        self.base, self.torn, self.round = base, False, self.round + 1
        old, self.ranks = self.ranks, []
        for number in range(count):
            rank = Rank(f"{self.round}.{number}", self.now)
            reply = self.ask(OpenShards(self.spec, rank.name, Incarnation(self.round), self.base))
            rank.epoch = reply.epoch
            self.ranks.append(rank)
        if self.stream:
            self.extend(0, 0)
        for rank in old:  # whoever is late is turned away
            with pytest.raises(ProtocolError):
                self.take(rank, 1, Incarnation(self.round - 1))

    def take(self, rank: Rank, want: int, incarnation: Incarnation | None = None) -> None:
        rank.seq += 1
        request = TakeShards(
            self.spec.name,
            rank.name,
            incarnation or Incarnation(self.round),
            rank.seq,
            rank.epoch,
            want,
            tuple(rank.done),
            tuple(rank.failed),
            starving=not rank.held,
            gap=self.gap(rank.seq) if self.stream else None,
            returned=tuple(rank.returned),
        )
        reply = self.ask(request)
        assert self.ask(request) == reply, "a repeated request changes nothing"
        rank.done, rank.failed, rank.returned, rank.heard = Spans(), [], [], self.now
        for span in reply.spans:
            reads = [other.epoch <= span.partition for other in self.ranks if other is not rank]
            assert self.stream or span.partition == rank.epoch or not any(reads), (
                "it is another loop's"
            )
        rank.held += reply.spans
        rank.exhausted = reply.exhausted
        if reply.settled:
            rank.settled = reply.settled
            for span in Spans.unpacked(reply.settled):
                rank.mine.remove(span)

    def gap(self, seed: int) -> Span | None:
        """Some place that is said to be empty; that it is dealt at once changes nothing else."""
        start = 7 * seed % 40
        return Span(seed % len(self.ends), start, start + seed % 9) if seed % 2 else None

    def learn(self, rank: Rank, count: int) -> None:
        """Hand samples to the model."""
        while count and rank.held:
            span = rank.held.pop(0)
            here = (span.partition, span.start)
            one = Span(span.partition, span.start, span.start + 1)
            if here in self.bad:
                rank.failed.append(FailedSpan(one, "rotten"))
            else:
                self.model[here] += 1
                rank.mine.add(one)
                rank.done.add(one)
            if span.start + 1 < span.stop:
                rank.held.insert(0, Span(span.partition, span.start + 1, span.stop))
            count -= 1

    def give_back(self, rank: Rank, keep: int) -> None:
        """Leave what is left of the last span to others."""
        if rank.held:
            last = rank.held.pop()
            middle = min(last.stop, last.start + keep)
            rank.returned += [Span(last.partition, middle, last.stop)] * (middle < last.stop)
            rank.held += [Span(last.partition, last.start, middle)] * (last.start < middle)

    def save(self) -> None:
        late = any(self.now - rank.heard > TIMEOUT for rank in self.ranks)
        if self.torn or late:
            return  # a worker that was cut off refuses to save
        states = [
            RankData(
                name=self.spec.name,
                size=self.spec.size,
                order="",
                rank=number,
                world_size=len(self.ranks),
                epoch=0,
                base=self.base,
                acknowledged=rank.mine.packed(),
                settled=rank.settled,
            ).as_dict()
            for number, rank in enumerate(self.ranks)
        ]
        self.checkpoints.append((Counter(self.model), states))

    def settle(self, back: int) -> None:
        """One of the round's checkpoints is stored, and its content is no longer saved rank by rank."""
        known = self.checkpoints[self.earlier :]
        if known:
            _, states = known[-1 - back % len(known)]
            packed = merged(states, self.spec)[0].packed()
            self.ask(SettleShards(self.spec.name, Incarnation(self.round), packed))

    def silence(self, rank: Rank) -> None:
        """A worker is cut off; when it is back it learns that its shards are others' now."""
        others = [other for other in self.ranks if other is not rank]
        for _ in range(3):
            for other in others:
                self.take(other, 0)
            self.now += TIMEOUT * 0.45
        for other in others:
            self.take(other, 3)
        if others:
            self.torn = True
            with pytest.raises(ProtocolError):
                self.take(rank, 1)

    def master_restarts(self) -> None:
        again = Shards()
        for request, now in self.journal:
            with contextlib.suppress(ProtocolError):  # as the first time
                again.handle(request, now)
        assert again == self.shards
        self.shards = again

    def extend(self, partition: int, by: int) -> None:
        if self.stream:
            self.ends[partition % len(self.ends)] += by
            self.ask(ExtendShards(self.spec.name, Incarnation(self.round), tuple(self.ends)))

    def do(self, kind: int, a: int, b: int) -> None:
        rank = self.ranks[a % len(self.ranks)]
        if kind == TAKE and not self.torn:
            self.take(rank, b)
        elif kind == LEARN:
            self.learn(rank, b)
        elif kind == SAVE:
            self.save()
        elif kind == BEGIN:
            known = len(self.checkpoints)
            fresh = not known or b == 1
            self.begin(1 + a % 4, None if fresh else known - 1 - b % min(known, 2))
        elif kind == MASTER:
            self.master_restarts()
        elif kind == SILENCE and not self.torn:
            self.silence(rank)
        elif kind == EXTEND:
            self.extend(a, b)
        elif kind == RETURN:
            self.give_back(rank, b - 1)
        elif kind == NEXT and not self.stream and rank.exhausted and not rank.held:
            rank.epoch = min(rank.epoch + 1, max(0, self.spec.epochs - 1))

    # ---- the end

    def acknowledge(self) -> None:
        if self.torn:
            self.begin(2, len(self.checkpoints) - 1 if self.checkpoints else None)
        last = max(0, self.spec.epochs - 1)
        for _ in range(100_000):
            for rank in self.ranks:
                self.learn(rank, 1 << 30)
                rank.epoch = last
                self.take(rank, 4)
            complete = self.ask(LookShards(self.spec.name)).complete
            if complete and all(r.exhausted and not r.held and not r.done for r in self.ranks):
                return
        pytest.fail("the data set never ends")

    def expected(self) -> dict[tuple[int, int], int]:
        if self.stream:
            partitions = dict(enumerate(zip(self.spec.begins, self.ends, strict=True)))
        else:
            size = self.spec.size - self.spec.size % self.spec.shard * self.spec.drop_last
            partitions = dict.fromkeys(range(self.spec.epochs), (0, size))
        return {
            (partition, n): 1
            for partition, (begin, end) in partitions.items()
            for n in range(begin, end)
            if (partition, n) not in self.bad
        }


epochs = st.builds(
    DataSpec,
    name=st.just("data"),
    size=st.integers(0, 60),
    epochs=st.integers(1, 3),
    shard=st.integers(1, 7),
    drop_last=st.booleans(),
    attempts=st.integers(1, 3),
    timeout=st.just(TIMEOUT),
)
streams = st.builds(
    DataSpec,
    name=st.just("stream"),
    begins=st.lists(st.integers(0, 50), min_size=1, max_size=3).map(tuple),
    shard=st.integers(1, 7),
    attempts=st.integers(1, 3),
    timeout=st.just(TIMEOUT),
)
TAKE, LEARN, SAVE, BEGIN, MASTER, SILENCE, EXTEND, NEXT, RETURN, SETTLE = range(10)
kinds = st.sampled_from(
    [TAKE] * 4 + [LEARN] * 4 + [SAVE] * 2 + [BEGIN, MASTER, SILENCE, EXTEND, NEXT, RETURN, SETTLE]
)
programs = st.lists(
    st.tuples(kinds, st.integers(0, 5), st.integers(1, 12)), min_size=30, max_size=60
)
rotten = st.frozensets(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=3)


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=150, deadline=None)
@given(st.one_of(epochs, streams), programs, rotten)
def test_every_sample_counts_once(spec, program, bad) -> None:
    job = Job(spec, bad)
    for kind, a, b in program:
        if kind == SETTLE:
            job.settle(b)
        else:
            job.do(kind, a, b)
    job.acknowledge()
    assert job.model == job.expected()
    gone = {place for place in bad if place in all_samples(job)}
    assert job.skipped == dict.fromkeys(gone, 1), (
        "a sample that no worker can read is skipped and reported once"
    )


def all_samples(job: Job) -> set[tuple[int, int]]:
    bad, job.bad = job.bad, frozenset()
    everything = set(job.expected())
    job.bad = bad
    return everything


# ---- one thing each


def opened(spec: DataSpec, *workers: str) -> Shards:
    shards = Shards()
    for worker in workers:
        shards.handle(OpenShards(spec, worker, Incarnation(1)), 0.0)
    return shards


def answer(commands: list[Command]) -> ShardReply:
    return next(c.reply for c in commands if isinstance(c, Answer))


def take(
    shards: Shards, worker: str, seq: int, want: int = 1, now: float = 0.0, **more
) -> ShardReply:
    request = TakeShards("data", worker, Incarnation(1), seq, want=want, **more)
    commands = shards.handle(request, now)
    shards.validate()
    return answer(commands)


def test_shards_that_follow_each_other_are_one_span() -> None:
    shards = opened(DataSpec(name="data", size=1000, shard=10), "a")
    assert take(shards, "a", 1, want=7).spans == (Span(0, 0, 70),)


def test_the_last_shards_are_dealt_one_by_one() -> None:
    """A worker that asks for many at the end would keep others idle."""
    shards = opened(DataSpec(name="data", size=100, shard=10), "a", "b")
    assert take(shards, "a", 1, want=10).spans == (Span(0, 0, 30),)
    assert take(shards, "b", 1, want=10).spans == (Span(0, 30, 50),)
    assert take(shards, "a", 2, want=10).spans == ()
    assert take(shards, "a", 3, want=10, acknowledged=(Span(0, 0, 20),)).spans == (Span(0, 50, 60),)
    assert take(shards, "b", 2, want=10, starving=True).spans == (Span(0, 60, 70),)


def test_what_is_tried_again_stays_in_its_epoch() -> None:
    """It goes to a worker that reads this epoch; only what nobody reads any more goes to a later loop."""
    shards = opened(DataSpec(name="data", size=20, shard=10, epochs=2, timeout=100.0), "a", "b")
    _, (of_b,) = (take(shards, worker, 1).spans for worker in "ab")
    assert take(shards, "b", 2, acknowledged=(of_b,)).exhausted
    first = take(shards, "a", 2, 0, failed=(FailedSpan(Span(0, 0, 1), "x"),))
    assert not first.exhausted
    later = take(shards, "b", 3, epoch=1)
    assert later.spans == (Span(1, 0, 10),)
    assert take(shards, "a", 3, starving=True).spans == (Span(0, 0, 1),)
    for seq, now in enumerate((40.0, 80.0, 110.0), 4):
        take(shards, "b", seq, 0, now=now, epoch=1)
    lost = take(shards, "b", 7, now=115.0, epoch=1, starving=True).spans
    assert lost == (Span(0, 0, 10),), "nobody reads this epoch any more"


def test_a_late_request_changes_nothing() -> None:
    """An agent may have passed on one that the worker has long repeated, and got an answer to."""
    shards = opened(DataSpec(name="data", begins=(0,), shard=10), "a")
    shards.handle(ExtendShards("data", Incarnation(1), (90,)), 0.0)
    for seq in (1, 2):
        take(shards, "a", seq)
    with pytest.raises(ProtocolError, match="Request 1 of worker a came after its request 2"):
        take(shards, "a", 1)
    assert take(shards, "a", 3).spans == (Span(0, 20, 30),)
    shards.handle(OpenShards(shards.queues["data"].spec, "b", Incarnation(2)), 0.0)
    with pytest.raises(ProtocolError, match="have started again"):
        shards.handle(ExtendShards("data", Incarnation(1), (95,)), 0.0)


def test_who_has_unread_messages_learns_that_others_have_none() -> None:
    shards = opened(DataSpec(name="data", begins=(0,), shard=10), "a", "b")
    shards.handle(ExtendShards("data", Incarnation(1), (10,)), 0.0)
    assert take(shards, "a", 1).spans == (Span(0, 0, 10),)
    assert not take(shards, "a", 2, 0).others_starve
    assert take(shards, "b", 1, starving=True).spans == ()
    assert take(shards, "a", 3, 0).others_starve
    take(shards, "a", 4, 0, returned=(Span(0, 6, 10),))
    assert take(shards, "b", 2, starving=True).spans == (Span(0, 6, 10),)
    assert not take(shards, "a", 5, 0).others_starve
    with pytest.raises(ProtocolError, match="which it does not hold"):
        take(shards, "a", 6, 0, returned=(Span(0, 5, 7),))


def test_a_gap_that_a_worker_has_found_is_one_shard() -> None:
    shards = opened(DataSpec(name="data", begins=(0, 0), shard=10), "a", "b")
    shards.handle(ExtendShards("data", Incarnation(1), (10_000, 0)), 0.0)
    assert take(shards, "a", 1, want=2).spans == (Span(0, 0, 20),)
    assert take(shards, "b", 1, want=1).spans == (Span(0, 20, 30),)
    done = (Span(0, 0, 20),)
    spans = take(shards, "a", 2, want=3, acknowledged=done, gap=Span(0, 20, 9_000)).spans
    assert spans == (Span(0, 30, 9_000), Span(0, 9_000, 9_020))
    spans = take(shards, "b", 2, want=1, gap=Span(0, 30, 8_000), starving=True).spans
    assert spans == (Span(0, 9_020, 9_030),), "what is dealt is dealt"
    shards.handle(ForgetWorker("a"), 0.0)
    gap = Span(0, 40, 9_000)
    spans = take(shards, "b", 3, want=2, gap=gap, acknowledged=(Span(0, 20, 30),)).spans
    assert spans == (Span(0, 30, 40), gap), "so it is when it was given back"
    with pytest.raises(ProtocolError, match="has no partition 2"):
        take(shards, "b", 4, gap=Span(2, 0, 10))


def test_a_worker_that_is_alone_gets_all_that_it_wants_of_the_last_shards() -> None:
    shards = opened(DataSpec(name="data", size=100, shard=10), "a", "b")
    assert take(shards, "a", 1, want=10).spans == (Span(0, 0, 30),)
    shards.handle(ForgetWorker("b"), 0.0)
    assert take(shards, "a", 2, want=6).spans == (Span(0, 30, 90),)
    assert take(shards, "a", 3, want=6).spans == (Span(0, 90, 100),)


def test_a_dead_workers_shards_go_to_others_at_once() -> None:
    shards = opened(DataSpec(name="data", size=30, shard=10), "a", "b")
    take(shards, "a", 1)
    take(shards, "a", 2, acknowledged=(Span(0, 0, 4),))
    shards.handle(ForgetWorker("a"), 0.0)
    assert take(shards, "b", 1, want=2).spans == (Span(0, 4, 10), Span(0, 10, 20))
    with pytest.raises(ProtocolError, match="were leased to others"):
        take(shards, "a", 3)
    with pytest.raises(ProtocolError, match="were leased to others"):
        shards.handle(OpenShards(shards.queues["data"].spec, "a", Incarnation(1)), 0.0)


def test_silence_is_not_counted_while_nobody_was_heard_of() -> None:
    """The service was stopped and continued, or the whole machine was; workers report four times in a timeout."""
    shards = opened(DataSpec(name="data", size=100, shard=10, timeout=100.0), "a", "b")
    first = take(shards, "a", 1, now=1.0).spans
    take(shards, "b", 1, now=2.0)
    take(shards, "b", 2, now=1000.0)
    assert take(shards, "a", 2, now=1001.0, acknowledged=first).acknowledged == 10
    for seq, now in enumerate((1030.0, 1060.0, 1090.0, 1102.0), 3):
        take(shards, "b", seq, now=now)
    with pytest.raises(ProtocolError, match="were leased to others"):
        take(shards, "a", 3, now=1103.0)


def test_a_request_that_is_repeated_is_heard() -> None:
    shards = opened(DataSpec(name="data", size=100, shard=10, timeout=100.0), "a", "b")
    first = take(shards, "a", 1, now=1.0).spans
    for seq, now in enumerate((30.0, 60.0, 90.0), 1):
        take(shards, "b", seq, now=now)
    assert take(shards, "a", 1, now=95.0).spans == first
    take(shards, "b", 4, now=120.0)
    assert take(shards, "a", 2, now=121.0, acknowledged=first).acknowledged == 10


def test_silence_is_not_counted_while_the_master_is_away() -> None:
    shards = opened(DataSpec(name="data", size=30, shard=10, timeout=5.0), "a", "b")
    take(shards, "a", 1)
    shards.forgive(100.0)
    for seq, now in enumerate((102.0, 104.0), 1):
        take(shards, "b", seq, now=now)
    take(shards, "b", 3, now=106.0)
    with pytest.raises(ProtocolError):
        take(shards, "a", 2, now=106.0)


@pytest.mark.parametrize(
    "reported",
    [{"acknowledged": (Span(0, 10, 11),)}, {"acknowledged": (Span(0, 0, 5), Span(0, 4, 6))}, {"acknowledged": (Span(9, 0, 1),)},
     {"failed": (FailedSpan(Span(0, 50, 51), "x"),)}],
)  # fmt: skip
def test_what_was_not_taken_cannot_be_reported(reported) -> None:
    shards = opened(DataSpec(name="data", size=100, shard=10), "a", "b")
    take(shards, "a", 1)
    take(shards, "b", 1)
    with pytest.raises(ProtocolError, match="it does not hold"):
        take(shards, "a", 2, **reported)
    shards.validate()
    assert take(shards, "a", 2, acknowledged=(Span(0, 0, 10),)).acknowledged == 10


def test_no_request_takes_longer_after_many_epochs() -> None:
    spec = DataSpec(name="data", size=4, shard=4, epochs=0)
    shards, last = opened(spec, "a"), ShardReply()
    for epoch in range(600):
        request = TakeShards(
            "data", "a", Incarnation(1), epoch, epoch, 1, last.spans, starving=True
        )
        last = answer(shards.handle(request, 0.0))
        assert last.spans == (Span(epoch, 0, 4),)
    shards.validate()
    queue = shards.queues["data"]
    assert len(queue.partitions) <= 2
    assert len(queue.workers["a"].held.partitions) <= 2
    look = answer(shards.handle(LookShards("data"), 0.0))
    assert (look.epoch, look.leased, queue.finished) == (600, 0, 599)
    assert Spans.unpacked(look.packed).count == 599 * 4
    done = Spans([Span(epoch, 0, 4) for epoch in range(599)]).packed()
    again = answer(shards.handle(OpenShards(spec, "b", Incarnation(2), done), 0.0))
    assert again.epoch == 599
    assert not queue.partitions


@pytest.mark.slow
def test_no_request_takes_longer_with_thousands_of_workers() -> None:
    """Those of all workers come at once, and a master answers nothing else meanwhile."""
    spec = DataSpec(name="data", size=10_000_000, shard=10)
    shards = opened(spec, *map(str, range(5000)))
    before = time.process_time()
    for worker in range(600):
        request = TakeShards("data", str(worker), Incarnation(1), 1, want=1, starving=True)
        assert answer(shards.handle(request, 1.0)).spans
    assert time.process_time() - before < 0.25


@pytest.mark.slow
def test_no_request_takes_longer_with_thousands_of_partitions() -> None:
    spec = DataSpec(name="data", begins=(0,) * 10_000, shard=10)
    shards, last = opened(spec, "a", "b"), ShardReply()
    shards.handle(ExtendShards("data", Incarnation(1), (10_000,) * 10_000), 0.0)
    before = time.process_time()
    for number in range(600):
        request = TakeShards(
            "data", "a", Incarnation(1), number, want=1, acknowledged=last.spans, starving=True
        )
        last = answer(shards.handle(request, 1.0))
        assert last.spans == (Span(number, 0, 10),)
    assert time.process_time() - before < 0.25
    shards.validate()


def test_an_epoch_far_ahead_is_refused() -> None:
    """The master would make all earlier ones, for as long as it lives."""
    shards = opened(DataSpec(name="data", size=100, shard=10, epochs=0), "a")
    with pytest.raises(ProtocolError, match="epochs up to 999 are accepted"):
        take(shards, "a", 1, epoch=2**60)
    assert take(shards, "a", 1, epoch=1).spans


def death(rank: int, round_: int, data: str, partition: int, position: int) -> Failure:
    return Failure(
        id="1",
        kind=FailureKind.SIGNAL,
        node_id=0,
        rank=rank,
        local_rank=0,
        round=round_,
        reading=(data_key(data), partition, position),
    )


@pytest.mark.parametrize(("size", "begins"), [(100, ()), (-1, (0, 40))])
def test_a_shard_that_workers_die_of_is_left_out(size, begins) -> None:
    """Not the first of what a worker holds, but the one that it says it reads; not what it has done."""
    spec = DataSpec(name="data", size=size, begins=begins, shard=10, attempts=2)
    shards = Shards()
    for round_ in (1, 2):
        worker = f"0-{round_}"
        shards.handle(OpenShards(spec, worker, Incarnation(round_)), 0.0)
        if begins:
            shards.handle(ExtendShards("data", Incarnation(round_), (50, 90)), 0.0)
        first, last = (
            next(c.reply.spans[0] for c in shards.handle(request, 0.0))
            for request in (
                TakeShards("data", worker, Incarnation(round_), seq, want=1) for seq in (1, 2)
            )
        )
        done = (first, Span(last.partition, last.start, last.start + 3))
        request = TakeShards("data", worker, Incarnation(round_), 3, want=0, acknowledged=done)
        shards.handle(request, 0.0)
        here = "data", last.partition, last.start + 3
        for rank, round_of, place in (
            (0, round_ - 1, here),
            (1, round_, here),
            (0, round_, ("other", *here[1:])),
            (0, round_, ("data", 7, 0)),
            (0, round_, ("data", first.partition, first.start)),
        ):
            assert shards.crashed(death(rank, round_of, *place), "it died") == []
        reports = shards.crashed(death(0, round_, *here), "it died")
        shards.validate()
        if round_ == 2:
            (report,) = reports
            assert report.what.span == last
            assert report.what.error == "it died, 2 times with them"
        else:
            assert reports == []
    shards.handle(OpenShards(spec, "0-4", Incarnation(4)), 0.0)
    if begins:
        shards.handle(ExtendShards("data", Incarnation(4), (50, 90)), 0.0)
    dealt = Spans()
    for seq in range(1, 30):
        request = TakeShards("data", "0-4", Incarnation(4), seq, want=1, starving=True)
        for span in next(c.reply.spans for c in shards.handle(request, 0.0)):
            dealt.add(span)
        shards.validate()
    assert dealt.count == 90
    assert not dealt.meets(last)


def test_all_workers_must_mean_the_same() -> None:
    shards = opened(DataSpec(name="data", size=100, shard=10), "a")
    with pytest.raises(ConfigurationError, match="has shard 20 here and 10 for the first"):
        shards.handle(
            OpenShards(DataSpec(name="data", size=100, shard=20), "b", Incarnation(1)), 0.0
        )
    spec, done = DataSpec(name="data", size=100, shard=10), Spans([Span(0, 0, 1)]).packed()
    with pytest.raises(ProtocolError, match="another checkpoint"):
        shards.handle(OpenShards(spec, "b", Incarnation(1), done), 0.0)


def test_a_stream_with_limits_of_some_partitions_is_refused() -> None:
    spec = DataSpec(name="data", begins=(0, 0, 0), limits=(5, 5))
    with pytest.raises(ConfigurationError, match="limits of 2 partitions and begins of 3"):
        opened(spec, "a")


def test_a_checkpoint_of_a_larger_data_set_is_refused() -> None:
    done = Spans([Span(0, 0, 101)]).packed()
    with pytest.raises(ProtocolError, match="has 100 samples"):
        Shards().handle(OpenShards(DataSpec(name="data", size=100), "a", Incarnation(1), done), 0.0)


def test_a_data_set_that_is_not_known_is_named() -> None:
    with pytest.raises(ProtocolError, match="lost its journal"):
        take(Shards(), "a", 1)


def test_a_look_at_a_data_set_changes_nothing() -> None:
    """No journal has it: a master that comes back has never seen it."""

    def dealt(*, look: bool) -> tuple[object, ...]:
        spec = DataSpec(name="d", size=-1, shard=1, timeout=TIMEOUT, begins=(0,))
        shards, me = Shards(), Incarnation(0, 0)
        for worker in ("0-a", "1-b"):
            shards.handle(OpenShards(spec, worker, me, b""), 0)
        shards.handle(ExtendShards("d", me, (8,)), 0)
        answers = []
        for worker, seq, now in (("0-a", 1, 0), ("1-b", 1, 0), ("0-a", 2, 80), ("0-a", 3, 120)):
            if now == 80 and look:
                shards.handle(LookShards("d"), 45)
            asked = TakeShards("d", worker, me, seq, 0, 2, (), (), True, None, ())
            found = shards.handle(asked, now)
            answers += [command.reply.spans for command in found if isinstance(command, Answer)]
        return tuple(answers)

    assert dealt(look=True) == dealt(look=False)
