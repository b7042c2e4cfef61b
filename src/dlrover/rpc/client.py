"""The client side: one connection to a job's master."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
import grpc.aio

from dlrover.rpc import messages, wire
from dlrover.rpc.connection import Connection
from dlrover.spec.roles import WORKER
from dlrover.spec.shards import ShardReply, ShardRequest

STACKS_WAIT = 30.0
"""Seconds that nodes may take to look at their workers."""


class MasterClient(Connection):
    """A connection to the master of a job."""

    async def move(self, address: str) -> None:
        """Go on with a master that listens elsewhere; open calls to the last one end."""
        if address != self.address:
            last, self._channel = self._channel, self._open(address)
            self.address = address
            await last.close()

    async def status(self) -> messages.Status:
        """Where the job stands."""
        return await self._call("Status", messages.StatusRequest(), messages.Status)

    async def stop(self, reason: str, exit_code: int) -> None:
        """Ask the master to end the job with ``exit_code``."""
        await self._call("Stop", messages.StopRequest(reason, exit_code), messages.Done)

    async def scale(self, nodes: int, reason: str, role: str = WORKER) -> messages.ScaleReply:
        """Ask the master for another number of nodes of a role."""
        request = messages.ScaleRequest(nodes, reason, role)
        reply: messages.ScaleReply = await self._call("Scale", request, messages.ScaleReply)
        return reply

    async def stacks(self) -> messages.Stacks:
        """Where every rank is; the nodes look now."""
        return await self._call("Stacks", messages.StacksRequest(), messages.Stacks, STACKS_WAIT)

    async def store(self, request: messages.StoreRequest) -> bytes | None:
        """Carry out a request on the job's key-value store; its value, None after a time-out."""
        wait = getattr(request, "wait", 0.0)
        reply = await self._call("Store", request, messages.StoreReply, wait)
        return reply.value

    async def shards(self, request: ShardRequest) -> ShardReply:
        """Take part in the dealing of a data set."""
        reply: ShardReply = await self._call("Shards", request, ShardReply)
        return reply

    async def watch(
        self, since: int = 0, *, follow: bool = False
    ) -> AsyncIterator[messages.Notice]:
        """The job's events after number ``since``, with its status; endless with ``follow``."""
        call = self._channel.unary_stream(f"/{wire.SERVICE}/Watch")(
            wire.encode(messages.WatchRequest(since, follow)),
            metadata=self._metadata,
            timeout=None if follow else self._timeout,
        )
        try:
            async for data in call:
                yield wire.decode(data, messages.Notice)
        except grpc.aio.AioRpcError as error:
            self._fail(error)
        finally:
            call.cancel()

    async def attend(
        self, outgoing: AsyncIterator[messages.AgentMessage]
    ) -> AsyncGenerator[messages.MasterMessage, None]:
        """Hold the agent's stream: send what ``outgoing`` yields, yield what the master says."""
        call = self._channel.stream_stream(f"/{wire.SERVICE}/Attend")(metadata=self._metadata)
        # Not a request iterator: grpc would leave it waiting when the master ends the stream.
        sending = asyncio.create_task(_send(call, outgoing))
        try:
            async for data in call:
                yield wire.decode(data, messages.MasterMessage)
        except grpc.aio.AioRpcError as error:
            self._fail(error)
        finally:
            sending.cancel()
            call.cancel()


async def _send(
    call: grpc.aio.StreamStreamCall, outgoing: AsyncIterator[messages.AgentMessage]
) -> None:
    """Send what ``outgoing`` yields until it ends, or the call does: then its reader is told why."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for message in outgoing:
            await call.write(wire.encode(message))
        await call.done_writing()
