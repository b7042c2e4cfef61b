"""The client of a job's master."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
import grpc.aio
import msgspec

from dlrover._util import decoding
from dlrover.errors import kind_of
from dlrover.rpc import messages, wire
from dlrover.rpc.batches import RequestBatcher
from dlrover.rpc.connection import REQUEST_TIMEOUT, Connection
from dlrover.spec.jobdir import JobDir, MasterAddress, MasterConfig, decode
from dlrover.spec.node import WORKER

STACKS_WAIT = 30.0
"""Additional seconds for the nodes to collect their workers' stacks."""

SAVE_WAIT = 60.0
"""Additional seconds for the nodes to store a step."""


class MasterClient(Connection):
    """A connection to a job's master."""

    async def move(self, address: str) -> None:
        """Switch to a master at another address; open calls to the previous one end."""
        if address != self.address:
            last, self._channel = self._channel, self._open(address)
            self.address = address
            await last.close()

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt; no longer than until the connection, if it has ended, is there again."""
        returns = asyncio.create_task(self._connects(self._channel))
        try:
            done, _ = await asyncio.wait({returns}, timeout=seconds)
            for task in done:
                task.result()
        finally:
            returns.cancel()

    async def _connects(self, channel: grpc.aio.Channel) -> None:
        """Wait until a channel without a connection has one; endlessly if it has one already."""
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            await asyncio.Event().wait()
        while state is not grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)

    async def status(self) -> messages.Status:
        """Return the status of the job."""
        return await self._call("Status", messages.StatusRequest(), messages.Status)

    async def stop(self, reason: str, exit_code: int) -> None:
        """Ask the master to end the job with ``exit_code``."""
        await self._call("Stop", messages.StopRequest(reason, exit_code), messages.Done)

    async def scale(self, nodes: int, reason: str, role: str = WORKER) -> messages.ScaleReply:
        """Ask the master to change the number of nodes of a role."""
        request = messages.ScaleRequest(nodes, reason, role)
        return await self._call("Scale", request, messages.ScaleReply)

    async def drain(self, node: int, reason: str) -> messages.ScaleReply:
        """Ask the master to put another node in the place of one."""
        request = messages.DrainRequest(node, reason)
        return await self._call("Drain", request, messages.ScaleReply)

    async def save(self, reason: str) -> messages.ScaleReply:
        """Ask the master to have the newest memory checkpoint stored."""
        request = messages.SaveRequest(reason)
        return await self._call("Save", request, messages.ScaleReply, SAVE_WAIT)

    async def ranks(self) -> messages.RanksReply:
        """Return what every rank does, as its node reported last."""
        return await self._call("Ranks", messages.RanksRequest(), messages.RanksReply)

    async def stacks(self) -> messages.Stacks:
        """Return the current stacks of every rank, collected by the nodes for this call."""
        return await self._call("Stacks", messages.StacksRequest(), messages.Stacks, STACKS_WAIT)

    def requests(self) -> RequestBatcher:
        """Return a batcher of encoded `WorkerRequest`s, whose replies are encoded `WorkerReply`s."""
        return RequestBatcher(self._deal, self._described, self._timeout)

    def _deal(self) -> grpc.aio.StreamStreamCall:
        return self._channel.stream_stream(f"/{wire.SERVICE}/Deal")(metadata=self._metadata)

    async def watch(
        self, since: int = 0, *, follow: bool = False
    ) -> AsyncIterator[messages.Notice]:
        """Yield the job's events after number ``since``, with its status; endlessly with ``follow``."""
        timeout = None if follow else self._timeout
        request = messages.WatchRequest(since, follow)
        async with contextlib.aclosing(
            self._follow("Watch", request, messages.Notice, timeout)
        ) as notices:
            async for notice in notices:
                yield notice

    async def attend(
        self, outgoing: AsyncIterator[messages.AgentMessage]
    ) -> AsyncGenerator[messages.MasterMessage, None]:
        """Hold the agent's stream: send the messages of ``outgoing``, yield those of the master."""
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
    """Send the messages of ``outgoing`` until it or the call ends; the call's reader gets any error."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for message in outgoing:
            await call.write(wire.encode(message))
        await call.done_writing()


def connect(job_dir: JobDir, timeout: float = REQUEST_TIMEOUT) -> MasterClient:
    """Return a client of the master of the job in a directory; ``timeout`` limits each call, in seconds.

    Raises:
        ConfigurationError: the directory does not contain the master's address.
        InfrastructureError: its volume fails.
    """
    try:
        address = decoding.json(job_dir.master.read_bytes(), MasterAddress).address
        token = job_dir.token.read_text().strip()
        tls = decode(job_dir.job, job_dir.job.read_bytes(), MasterConfig).tls
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise kind_of(error)(
            f"{job_dir.path} holds no address of its job's master: {error}."
        ) from error
    return MasterClient(address, token, tls, timeout)
