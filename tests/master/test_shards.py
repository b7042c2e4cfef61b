"""The master deals: journalled, so that the next master deals on; workers ask by way of their agent."""

import asyncio
import contextlib
import socket

import msgspec

from dlrover._util import framing
from dlrover.data.machine.datasets import Shards
from dlrover.data.machine.queue import Command
from dlrover.errors import InfrastructureError
from dlrover.master.journal.history import History
from dlrover.master.journal.journal import open_journal
from dlrover.master.service import Master
from dlrover.rpc import wire
from dlrover.rpc.batches import RequestRelay
from dlrover.rpc.client import MasterClient
from dlrover.rpc.messages import Record, RequestFrame
from dlrover.rpc.relayed import RelayedMaster
from dlrover.rpc.server import Server
from dlrover.spec.job import JobSpec
from dlrover.spec.requests import Unanswered, WorkerReply
from dlrover.spec.requests.shards import (
    MAX_ACKNOWLEDGED,
    DataSpec,
    FailedSpan,
    Incarnation,
    LookShards,
    OpenShards,
    ShardReply,
    ShardRequest,
    Span,
    TakeShards,
)

SPEC = DataSpec(name="data", size=100, shard=10, attempts=1)
ROUND = Incarnation(1)


@contextlib.contextmanager
def master_at(directory):
    journal = open_journal("file:", directory / "journal")
    history = History(directory / "events")
    with contextlib.closing(journal), contextlib.closing(history):
        master = Master(journal, history)
        master.begin(JobSpec(name="job"), str(directory), None)
        yield master


@contextlib.asynccontextmanager
async def relayed(master: Master):
    """The address where a worker asks this master."""
    server = Server("token")
    master.register(server)
    port = await server.start("127.0.0.1", 0)
    try:
        client = MasterClient(f"127.0.0.1:{port}", "token", timeout=2.0)
        async with client, RequestRelay(client.requests()) as relay:
            yield relay.address, server
    finally:
        await server.stop(0.0)


def take(seq: int, *done: Span, failed: tuple[FailedSpan, ...] = ()) -> TakeShards:
    return TakeShards("data", "a", ROUND, seq, want=2, acknowledged=done, failed=failed)


def test_the_next_master_deals_on(tmp_path) -> None:
    async def first() -> ShardReply:
        with master_at(tmp_path) as master:
            await master.requests.use(OpenShards(SPEC, "a", ROUND))
            await master.requests.use(OpenShards(SPEC, "b", ROUND))
            await master.requests.use(take(1))
            refused = await master.requests.use(take(9, Span(0, 50, 60)))
            assert "does not hold" in refused.refused
            return await master.requests.use(take(2, Span(0, 0, 15)))

    async def second() -> tuple[ShardReply, ShardReply, ShardReply]:
        with master_at(tmp_path) as master:
            repeated = await master.requests.use(take(2, Span(0, 0, 15)))
            more = await master.requests.use(take(3, Span(0, 15, 30)))
            return repeated, more, await master.requests.use(LookShards("data"))

    before = asyncio.run(first())
    repeated, more, look = asyncio.run(second())
    assert before.spans == (Span(0, 20, 30),)
    assert repeated == before
    assert more.spans == (Span(0, 30, 50),)
    assert (look.acknowledged, look.leased) == (30, 20)


def test_a_worker_asks_by_way_of_its_agent(tmp_path) -> None:
    async def ask() -> list[ShardReply]:
        with master_at(tmp_path) as master:
            async with relayed(master) as (address, server):
                service = RelayedMaster(address)
                try:
                    opened = await asyncio.to_thread(service.ask, OpenShards(SPEC, "a", ROUND))
                    taken = await asyncio.to_thread(service.ask, take(1))
                    bad = take(2, failed=(FailedSpan(Span(0, 3, 4), "rotten"),))
                    skipped = await asyncio.to_thread(service.ask, bad)
                    unknown = await asyncio.to_thread(service.ask, LookShards("other"))
                    await server.stop(0.0)
                    away = await asyncio.to_thread(service.ask, take(3))
                finally:
                    service.close()
        return [opened, taken, skipped, unknown, away]

    opened, taken, skipped, unknown, away = asyncio.run(ask())
    assert opened == ShardReply()
    assert taken.spans == (Span(0, 0, 20),)
    assert [(one.span, one.error) for one in skipped.skipped] == [(Span(0, 3, 4), "rotten")]
    assert "knows no data set other" in unknown.refused
    assert "cannot be reached" in away.away


def test_an_agent_that_is_gone_is_told() -> None:
    assert "does not answer" in RelayedMaster("dlrover-nobody").ask(LookShards("data")).away


def test_what_is_too_large_is_refused(tmp_path) -> None:
    """Asking again and again would not help."""

    async def ask() -> list[ShardReply]:
        with master_at(tmp_path) as master:
            async with relayed(master) as (address, _):
                with contextlib.closing(RelayedMaster(address)) as service:
                    sizes = (MAX_ACKNOWLEDGED + 1, framing.MAX_FRAME)
                    large = [OpenShards(SPEC, "a", ROUND, bytes(size)) for size in sizes]
                    return [await asyncio.to_thread(service.ask, request) for request in large]

    beyond_the_field, beyond_the_frame = asyncio.run(ask())
    assert "A message could not be read" in beyond_the_field.refused
    assert "4194304 are accepted" in beyond_the_frame.refused


def test_a_worker_that_sends_too_much_is_cut_off(tmp_path) -> None:
    async def send() -> bytes:
        with master_at(tmp_path) as master:
            async with relayed(master) as (address, _):
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(5.0)
                    sock.connect(f"\0{address}")
                    sock.sendall(b"\xff\xff\xff\xff")
                    return await asyncio.to_thread(sock.recv, 1)

    assert asyncio.run(send()) == b""


def frame_of(*requests: object) -> RequestFrame:
    return RequestFrame(
        tuple(
            Record(number, one if isinstance(one, bytes) else wire.encode(one))
            for number, one in enumerate(requests)
        )
    )


async def dealt(master: Master, *frames: RequestFrame) -> list[list[WorkerReply]]:
    """The replies to each frame, in the order of its requests."""

    async def sent():
        for frame in frames:
            yield frame

    replies = []
    async for frame in master.requests.deal(sent()):
        assert [number for number, _ in frame.records] == list(range(len(frame.records)))
        replies.append([wire.decode(body, WorkerReply) for _, body in frame.records])
    return replies


def test_a_frame_that_comes_twice_counts_once_also_after_a_new_master(tmp_path) -> None:
    opens = frame_of(*(OpenShards(SPEC, name, ROUND) for name in "ab"))
    takes = frame_of(take(1), TakeShards("data", "b", ROUND, 1, want=2))

    async def first() -> list[list[ShardReply]]:
        with master_at(tmp_path) as master:
            return await dealt(master, opens, takes, takes)

    async def second() -> list[list[ShardReply]]:
        with master_at(tmp_path) as master:
            return await dealt(master, takes, frame_of(LookShards("data")))

    _, before, repeated = asyncio.run(first())
    again, (look,) = asyncio.run(second())
    assert [one.spans for one in before] == [(Span(0, 0, 20),), (Span(0, 20, 40),)]
    assert before == repeated == again
    assert (look.acknowledged, look.leased) == (0, 40)


def test_a_request_of_a_frame_that_fails_fails_alone(tmp_path) -> None:
    async def ask() -> list[ShardReply]:
        with master_at(tmp_path) as master:
            await dealt(master, frame_of(OpenShards(SPEC, "a", ROUND)))
            unknown = TakeShards("other", "a", ROUND, 1)
            (replies,) = await dealt(master, frame_of(b"\xc1", unknown, take(1)))
            return replies

    unreadable, unknown, taken = asyncio.run(ask())
    assert "A message could not be read" in unreadable.refused
    assert "knows no data set other" in unknown.refused
    assert taken.spans == (Span(0, 0, 20),)


def test_an_empty_span_is_refused_before_it_is_journalled(tmp_path) -> None:
    """Each worker holds all empty spans, also those of partitions that do not exist."""
    body = msgspec.msgpack.decode(wire.encode(take(2, Span(7, 4, 5))))
    assert body[7] == [[7, 4, 5]]
    body[7] = [[7, 5, 5]]

    async def ask() -> list[WorkerReply]:
        with master_at(tmp_path) as master:
            await dealt(master, frame_of(OpenShards(SPEC, "a", ROUND), take(1)))
            (replies,) = await dealt(master, frame_of(msgspec.msgpack.encode(body), take(3)))
            requests = [entry for _, entry in master.journal._journal.entries()]
            assert [one.seq for one in requests if isinstance(one, TakeShards)] == [1, 3]
            return replies

    empty, taken = asyncio.run(ask())
    assert "the end must be above the start" in empty.refused
    assert taken.spans == (Span(0, 20, 40),)


def test_a_request_that_cannot_be_handled_ends_neither_this_master_nor_the_next(
    tmp_path, monkeypatch, caplog
) -> None:
    handle = Shards.handle

    def fails(shards: Shards, event: ShardRequest, now: float) -> list[Command]:
        if isinstance(event, TakeShards) and event.seq == 2:
            raise KeyError(7)
        return handle(shards, event, now)

    monkeypatch.setattr(Shards, "handle", fails)

    async def ask(*requests: ShardRequest) -> list[WorkerReply]:
        with master_at(tmp_path) as master:
            (replies,) = await dealt(master, frame_of(*requests))
            return replies

    _, _, failed, taken = asyncio.run(ask(OpenShards(SPEC, "a", ROUND), take(1), take(2), take(3)))
    assert "cannot handle the request: KeyError(7)" in failed.refused
    caplog.clear()
    (repeated,) = asyncio.run(ask(take(3)))
    assert repeated == taken
    assert "cannot handle a request of a worker: TakeShards(data='data'" in caplog.text


def test_a_frame_is_one_entry_into_the_journal_and_all_of_it_waits_for_the_disk(tmp_path) -> None:
    async def ask() -> tuple[list[int], list[ShardReply]]:
        with master_at(tmp_path) as master:
            written = []
            append = master.journal._journal.append_all

            def full(entries, now):
                written.append(len(entries))
                if len(written) > 1:
                    raise InfrastructureError("The disk is full.")
                append(entries, now)

            master.journal._journal.append_all = full
            opens = frame_of(*(OpenShards(SPEC, name, ROUND) for name in "abcd"))
            _, refused = await dealt(master, opens, frame_of(take(1), take(2)))
            return written, refused

    written, refused = asyncio.run(ask())
    assert written == [4, 2]
    assert all(isinstance(one, Unanswered) and "The disk is full" in one.away for one in refused)
