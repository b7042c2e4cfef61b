"""Batched requests on a real stream: what goes together, and what a lost, late or repeated reply does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from dlrover.errors import DLRoverError, InfrastructureError
from dlrover.rpc import batches
from dlrover.rpc.batches import FRAME_BYTES
from dlrover.rpc.client import MasterClient
from dlrover.rpc.connection import CUT
from dlrover.rpc.messages import MAX_RECORDS, Record, RequestFrame
from dlrover.rpc.server import Server

TOKEN = "right"
WORKERS = 8


class Peer:
    """A server that answers each request with its body in upper case, and notes the frames of each stream."""

    def __init__(self) -> None:
        self.frames: list[list[bytes]] = []
        self.streams = 0
        self.answer: Callable[[RequestFrame], Awaitable[list[RequestFrame]]] = echo
        self.under_way = self.most_under_way = 0

    async def deal(self, frames: AsyncIterator[RequestFrame]) -> AsyncIterator[RequestFrame]:
        self.streams += 1
        async for frame in frames:
            self.frames.append([body for _, body in frame.records])
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            replies = await self.answer(frame)
            self.under_way -= 1
            for reply in replies:
                yield reply


async def echo(frame: RequestFrame) -> list[RequestFrame]:
    return [RequestFrame(tuple(Record(number, body.upper()) for number, body in frame.records))]


class Client(MasterClient):
    """A client with one batch of requests under way, as an agent has."""

    def __init__(self, address: str, timeout: float) -> None:
        super().__init__(address, TOKEN, timeout=timeout)
        self.forward = self.requests().ask


@contextlib.asynccontextmanager
async def connected(peer: Peer, timeout: float = 5.0) -> AsyncIterator[Client]:
    server = Server(TOKEN)
    server.stream("Deal", RequestFrame, peer.deal)
    port = await server.start("127.0.0.1", 0)
    try:
        async with Client(f"127.0.0.1:{port}", timeout) as client:
            yield client
    finally:
        await server.stop(0.0)


async def all_of(client: Client, bodies: list[bytes]) -> list[bytes | BaseException]:
    return await asyncio.gather(*map(client.forward, bodies), return_exceptions=True)


def bodies(count: int = WORKERS) -> list[bytes]:
    return [b"request-%d" % number for number in range(count)]


def test_what_the_workers_of_an_agent_ask_at_the_same_time_is_one_frame() -> None:
    async def test() -> None:
        peer = Peer()
        async with connected(peer) as client:
            for _ in range(10):
                assert await all_of(client, bodies()) == [body.upper() for body in bodies()]
        assert peer.streams == 1
        assert peer.frames == [bodies()] * 10

    asyncio.run(test())


def test_a_frame_waits_for_as_many_requests_as_the_last_one_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers ask again when they have their replies, never in the same instant of the loop."""

    async def test() -> None:
        peer = Peer()
        async with connected(peer) as client:
            await all_of(client, bodies())
            monkeypatch.setattr(batches, "WINDOW", 60.0)
            asked = []
            for body in bodies():
                asked.append(asyncio.ensure_future(client.forward(body)))
                await asyncio.sleep(0.002)
            assert await asyncio.gather(*asked) == [body.upper() for body in bodies()]
            monkeypatch.setattr(batches, "WINDOW", 0.001)
            assert await client.forward(b"alone") == b"ALONE"
        assert peer.frames == [bodies(), bodies(), [b"alone"]]

    asyncio.run(test())


def test_a_reply_that_comes_twice_or_for_another_stream_is_nobodys() -> None:
    async def noisy(frame: RequestFrame) -> list[RequestFrame]:
        (reply,) = await echo(frame)
        unknown = RequestFrame(
            tuple(Record(number + 1000, b"stray") for number, _ in reply.records)
        )
        first, rest = RequestFrame(reply.records[:1]), RequestFrame(reply.records[1:])
        return [unknown, first, first, rest, reply]

    async def test() -> None:
        peer = Peer()
        peer.answer = noisy
        async with connected(peer) as client:
            for _ in range(5):
                assert await all_of(client, bodies()) == [body.upper() for body in bodies()]

    asyncio.run(test())


@pytest.mark.parametrize("answered", [0, 3])
def test_after_a_lost_frame_the_callers_fail_and_its_late_replies_reach_nobody(
    answered: int,
) -> None:
    held = asyncio.Event()

    async def loses(frame: RequestFrame) -> list[RequestFrame]:
        peer.answer = echo
        if answered:
            return [RequestFrame((await echo(frame))[0].records[:answered])]
        await held.wait()
        return [RequestFrame(tuple(Record(number, b"late") for number in range(100)))]

    peer = Peer()

    async def test() -> None:
        peer.answer = loses
        async with connected(peer, timeout=0.3) as client:
            replies = await all_of(client, bodies())
            assert replies[:answered] == [body.upper() for body in bodies(answered)]
            lost = replies[answered:]
            assert all(isinstance(reply, InfrastructureError) for reply in lost)
            assert "did not answer within 0.3 s" in str(lost[0])
            held.set()
            assert await all_of(client, bodies()) == [body.upper() for body in bodies()]
        assert peer.streams == 2

    asyncio.run(test())


def test_a_slow_peer_has_one_frame_at_a_time_and_the_others_wait_in_their_order() -> None:
    async def slow(frame: RequestFrame) -> list[RequestFrame]:
        await asyncio.sleep(0.02)
        return await echo(frame)

    async def test() -> None:
        peer = Peer()
        peer.answer = slow
        many = bodies(MAX_RECORDS + 10)
        async with connected(peer) as client:
            assert await all_of(client, many) == [body.upper() for body in many]
        assert [body for frame in peer.frames for body in frame] == many
        assert max(map(len, peer.frames)) <= MAX_RECORDS
        assert peer.most_under_way == 1

    asyncio.run(test())


def test_large_requests_have_frames_of_their_own() -> None:
    async def test() -> None:
        peer = Peer()
        large = bytes(FRAME_BYTES + 1)
        async with connected(peer) as client:
            assert await all_of(client, [b"a", large, b"b"]) == [b"A", large, b"B"]
        assert [len(frame) for frame in peer.frames] == [1, 1, 1]

    asyncio.run(test())


def test_a_caller_that_leaves_takes_its_request_with_it() -> None:
    async def test() -> None:
        peer = Peer()
        async with connected(peer) as client:
            left, stayed = (asyncio.ensure_future(client.forward(body)) for body in (b"a", b"b"))
            await asyncio.sleep(0)
            left.cancel()
            assert await stayed == b"B"
        assert peer.frames == [[b"b"]]

    asyncio.run(test())


@pytest.mark.parametrize("how", ["moves", "closes"])
def test_a_connection_that_moves_or_closes_fails_the_requests_under_way(how: str) -> None:
    async def test() -> None:
        peer, other = Peer(), Peer()
        peer.answer = lambda _frame: asyncio.Event().wait()  # type: ignore[assignment,return-value]
        async with connected(peer) as client, connected(other) as next_:
            asking = asyncio.ensure_future(all_of(client, bodies()))
            while not peer.frames:
                await asyncio.sleep(0.005)
            await (client.move(next_.address) if how == "moves" else client.close())
            replies = await asyncio.wait_for(asking, 20.0)
            assert all(isinstance(reply, InfrastructureError) for reply in replies)
            if how == "moves":
                assert await all_of(client, [b"a"]) == [b"A"]
                assert other.frames == [[b"a"]]

    asyncio.run(test())


@pytest.mark.parametrize("details", [CUT, f"{CUT}."])
def test_a_write_on_a_stream_whose_connection_has_ended_is_no_failure_of_the_master(
    details,
) -> None:
    """gRPC describes it so if the end comes between the check of the stream and the write."""

    async def test() -> DLRoverError:
        nothing = grpc.aio.Metadata()
        cut = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details)
        async with MasterClient("127.0.0.1:9", TOKEN) as client:
            return client._described(cut)

    assert str(asyncio.run(test())) == (
        "The master at 127.0.0.1:9 cannot be reached: the connection has ended."
    )
