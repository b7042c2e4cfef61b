"""The relay of a node's requests: its agent takes them from the workers, which have no connection to the master.

Those that wait at the same time travel in one frame: a single request over gRPC costs both sides many times as
much as what is in it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import grpc.aio

from dlrover._util import framing
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError, ProtocolError
from dlrover.rpc import messages, wire
from dlrover.rpc.localserver import LocalServer
from dlrover.spec.requests import Unanswered

logger = logging.getLogger(__name__)

WINDOW = 0.001
"""Seconds that a frame waits for as many requests as the last one had."""
FRAME_BYTES = 1024 * 1024
"""Maximum bytes of the records in a frame; a larger record has a frame of its own."""


class _Waiting(NamedTuple):
    number: int
    request: bytes
    reply: asyncio.Future[bytes]


class RequestBatcher:
    """Encoded requests to one method, batched. A peer gets one frame at a time, in the order of the requests.

    A frame's requests fail together if the stream ends, or if one of them has no reply within the time limit.
    They may have been carried out, so the requests must be such that a repeat changes nothing. Each frame
    after a failure has a new stream: no reply of an earlier stream is taken for one of a later request.

    Args:
        connect: Opens a stream.
        describe: Returns the error for a failed call.
        timeout: Time limit of a frame in seconds.
    """

    def __init__(
        self,
        connect: Callable[[], grpc.aio.StreamStreamCall],
        describe: Callable[[grpc.aio.AioRpcError], DLRoverError],
        timeout: float,
    ) -> None:
        self._connect, self._describe, self._timeout = connect, describe, timeout
        self._numbers = itertools.count()
        self._waiting: deque[_Waiting] = deque()
        self._usual = 1
        self._enough = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._stream: grpc.aio.StreamStreamCall | None = None

    async def ask(self, request: bytes) -> bytes:
        """Return the reply to a request.

        Raises:
            DLRoverError: There is none; the error is that of the stream.
        """
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(next(self._numbers), request, reply))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        elif len(self._waiting) >= self._usual:
            self._enough.set()
        return await reply

    def close(self) -> None:
        """End the stream; requests without a reply fail."""
        if self._sender is not None:
            self._sender.cancel()
        self._hang_up()
        self._fail(self._waiting, InfrastructureError("The connection was closed."))
        self._waiting.clear()

    async def _send(self) -> None:
        while self._waiting:
            await self._gather()
            frame = self._frame()
            if frame:
                await self._exchange(frame)

    async def _gather(self) -> None:
        """Wait until as many requests have come as the last frame had, no longer than `WINDOW`."""
        if len(self._waiting) >= self._usual:
            return
        self._enough.clear()
        timer = asyncio.get_running_loop().call_later(WINDOW, self._enough.set)
        await self._enough.wait()
        timer.cancel()

    def _frame(self) -> list[_Waiting]:
        """Take the requests of the next frame; drop those whose callers have left."""
        frame: list[_Waiting] = []
        size = 0
        while self._waiting:
            first = self._waiting[0]
            size += len(first.request)
            if frame and (size > FRAME_BYTES or len(frame) == messages.MAX_RECORDS):
                break
            self._waiting.popleft()
            if first.reply.cancelled():
                size -= len(first.request)
            else:
                frame.append(first)
        self._usual = max(1, len(frame))
        return frame

    async def _exchange(self, frame: list[_Waiting]) -> None:
        """Send a frame and hand out the replies; if that fails, so do the requests that have none."""
        # A task of its own: grpc raises CancelledError in the reader of a call whose channel closes.
        carrying = asyncio.create_task(self._carry(frame))
        error: BaseException | None = InfrastructureError("The connection was closed.")
        try:
            await asyncio.wait({carrying}, timeout=self._timeout)
            if not carrying.done():
                seconds = f"{self._timeout:g} s"
                error = InfrastructureError(f"The master did not answer within {seconds}.")
            elif not carrying.cancelled():
                error = carrying.exception()
        finally:
            if error is not None:
                carrying.cancel()
                self._hang_up()
                self._fail(frame, error)

    async def _carry(self, frame: list[_Waiting]) -> None:
        if self._stream is None or self._stream.done():
            self._stream = self._connect()
        missing = {each.number: each.reply for each in frame}
        records = tuple(messages.Record(each.number, each.request) for each in frame)
        try:
            await self._stream.write(wire.encode(messages.RequestFrame(records)))
            while missing:
                data = await self._stream.read()
                if data is grpc.aio.EOF:
                    raise InfrastructureError("The master ended the stream.")
                for number, body in wire.decode(data, messages.RequestFrame).records:
                    reply = missing.pop(number, None)
                    if reply is not None and not reply.done():
                        reply.set_result(body)
        except grpc.aio.AioRpcError as error:
            raise self._describe(error) from error
        except asyncio.InvalidStateError as error:
            raise InfrastructureError("The master ended the stream.") from error

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    @staticmethod
    def _fail(requests: deque[_Waiting] | list[_Waiting], error: BaseException) -> None:
        for each in requests:
            if not each.reply.done():
                each.reply.set_exception(error)


class RequestRelay(LocalServer):
    """A server that forwards the workers' requests to the master; see `dlrover.rpc.relayed`."""

    def __init__(self, requests: RequestBatcher) -> None:
        super().__init__("relay", self._relay)
        self._requests = requests

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        self._requests.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                reply = await self._answer(await framing.read(reader))
                writer.write(framing.pack(reply))
                await writer.drain()
        except framing.FrameTooLongError as error:
            logger.warning("Closed a worker's connection: %s", error)

    async def _answer(self, request: bytes) -> bytes:
        try:
            return await self._requests.ask(request)
        except InfrastructureError as error:
            return wire.encode(Unanswered(away=str(error)))
        except (ProtocolError, ConfigurationError) as error:
            return wire.encode(Unanswered(refused=str(error)))
