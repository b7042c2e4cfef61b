"""The client side: one connection to a job's master."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
import msgspec

from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError
from dlrover.rpc import messages, wire
from dlrover.spec.shards import ShardReply, ShardRequest

if TYPE_CHECKING:
    from typing_extensions import Self

REQUEST_TIMEOUT = 10.0
"""Seconds that a request may take unless its client says otherwise."""

STACKS_WAIT = 30.0
"""Seconds that nodes may take to look at their workers."""


class MasterClient:
    """A connection to the master at ``address`` (``host:port``). Use it as an async context manager.

    A request may take ``timeout`` seconds, on top of a wait that it asks for itself.

    Every method raises

    - `InfrastructureError` when the master cannot be reached within the time limit,
    - `ConfigurationError` when it refuses the token,
    - `ProtocolError` when it does not understand the message.
    """

    def __init__(
        self,
        address: str,
        token: str,
        tls: wire.Tls | None = None,
        timeout: float = REQUEST_TIMEOUT,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._metadata = ((wire.TOKEN_KEY, wire.checked_token(token)),)
        self._credentials = tls.channel_credentials() if tls else None
        self._server_name = tls.server_name if tls else ""
        self._channel = self._open(address)

    def _open(self, address: str) -> grpc.aio.Channel:
        options: list[tuple[str, int | str]] = [*wire.CHANNEL_OPTIONS]
        if self._credentials is not None:
            if self._server_name:
                options.append(("grpc.ssl_target_name_override", self._server_name))
            return grpc.aio.secure_channel(address, self._credentials, options=options)
        return grpc.aio.insecure_channel(address, options=options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

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

    async def _call(
        self, method: str, request: msgspec.Struct, reply: Any, wait: float = 0.0
    ) -> Any:
        call = self._channel.unary_unary(f"/{wire.SERVICE}/{method}")
        try:
            data = await call(
                wire.encode(request), metadata=self._metadata, timeout=self._timeout + wait
            )
        except grpc.aio.AioRpcError as error:
            self._fail(error)
        return wire.decode(data, reply)

    def _fail(self, error: grpc.aio.AioRpcError) -> NoReturn:
        """Raise what a failed call means to the caller."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise ConfigurationError(
                f"The master at {self.address} refused the connection: {details}"
            ) from error
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
            raise ProtocolError(
                f"The master at {self.address} did not understand a message: {details}"
            ) from error
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise ProtocolError(
                f"The master at {self.address} refused a message: {details}"
            ) from error
        failed = code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        raise InfrastructureError(
            f"The master at {self.address} {'failed' if failed else 'cannot be reached'}: "
            f"{(details or code.name).rstrip('.')}."
        ) from error


async def _send(
    call: grpc.aio.StreamStreamCall, outgoing: AsyncIterator[messages.AgentMessage]
) -> None:
    """Send what ``outgoing`` yields until it ends, or the call does: then its reader is told why."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for message in outgoing:
            await call.write(wire.encode(message))
        await call.done_writing()
