"""The server: three kinds of methods over gRPC, each with a token check and typed messages."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
import msgspec

from dlrover.errors import (
    ConfigurationError,
    DLRoverError,
    InfrastructureError,
    ProtocolError,
)
from dlrover.rpc import wire
from dlrover.spec.jobdir import TlsFiles

Unary = Callable[[Any], Awaitable[msgspec.Struct]]
ServerStream = Callable[[Any], AsyncIterator[msgspec.Struct]]
Stream = Callable[[AsyncIterator[Any]], AsyncIterator[msgspec.Struct]]

caller: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="")
"""Name of the token with which the current call was made; empty for the server's own token."""


class Server:
    """A server of typed methods for callers with a token. Register methods, then `start`.

    If a message cannot be read, or a method raises a `DLRoverError`, the caller gets the reason.

    Args:
        token: The server's own token.
        tls: TLS files for the server's connections.
        service: Name of the service on the wire.
        program: Name of the server in errors.
        callers: More tokens, by the name that `caller` has during their calls.
    """

    def __init__(
        self,
        token: str,
        tls: TlsFiles | None = None,
        service: str = wire.SERVICE,
        program: str = "master",
        callers: Mapping[str, str] | None = None,
    ) -> None:
        self._service, self._program = service, program
        self._tokens = {
            name: wire.checked_token(one) for name, one in {**(callers or {}), "": token}.items()
        }
        self._credentials = wire.server_credentials(tls) if tls else None
        self._methods: dict[str, grpc.RpcMethodHandler] = {}
        self._server: grpc.aio.Server | None = None

    def unary(self, name: str, request: Any, call: Unary) -> None:
        """Register a method with one request and one reply."""

        async def serve(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
            if not self._knows_token(context):
                await _turn_away(context)
            try:
                return wire.encode(await call(wire.decode(data, request)))
            except DLRoverError as error:
                return await _refuse(context, error)

        self._methods[name] = grpc.unary_unary_rpc_method_handler(serve)

    def server_stream(self, name: str, request: Any, call: ServerStream) -> None:
        """Register a method with one request and a stream of replies; what goes to many callers is encoded once."""
        encode = _encoder()

        async def serve(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            if not self._knows_token(context):
                await _turn_away(context)
            try:
                async for reply in call(wire.decode(data, request)):
                    yield encode(reply)
            except DLRoverError as error:
                await _refuse(context, error)

        self._methods[name] = grpc.unary_stream_rpc_method_handler(serve)

    def stream(self, name: str, request: Any, call: Stream) -> None:
        """Register a method with a stream in each direction; what goes to many callers at once is encoded once."""
        encode = _encoder()

        async def serve(
            frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[bytes]:
            if not self._knows_token(context):
                await _turn_away(context)

            async def messages() -> AsyncIterator[Any]:
                async for data in frames:
                    yield wire.decode(data, request)

            try:
                async for reply in call(messages()):
                    yield encode(reply)
            except DLRoverError as error:
                await _refuse(context, error)

        self._methods[name] = grpc.stream_stream_rpc_method_handler(serve)

    async def start(self, host: str, port: int) -> int:
        """Listen on ``host:port`` (0: any free port) and return the port.

        Raises:
            InfrastructureError: The port is taken or the address is not this machine's.
        """
        server = grpc.aio.server(options=list(wire.SERVER_OPTIONS))
        handler = grpc.method_handlers_generic_handler(self._service, self._methods)
        server.add_generic_rpc_handlers((handler,))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._credentials is not None:
                bound = server.add_secure_port(address, self._credentials)
            else:
                bound = server.add_insecure_port(address)
        except RuntimeError as error:
            raise InfrastructureError(
                f"The {self._program} cannot listen on {address}: the port is taken by another program or the "
                f"address is not this machine's; choose another port."
            ) from error
        await server.start()
        self._server = server
        return int(bound)

    async def stop(self, grace: float) -> None:
        """Stop listening; open calls get ``grace`` seconds to finish."""
        if self._server is not None:
            await self._server.stop(grace)

    def _knows_token(self, context: grpc.aio.ServicerContext) -> bool:
        """Return whether the caller has a valid token; compare it with all, so that timing reveals none."""
        for key, value in context.invocation_metadata() or ():
            if key == wire.TOKEN_KEY:
                found = [
                    name for name, one in self._tokens.items() if wire.token_matches(value, one)
                ]
                caller.set(found[0] if found else "")
                return bool(found)
        return False


def _encoder() -> Callable[[Any], bytes]:
    """Return a function that encodes replies, and does so once for a reply that comes again."""
    last: Any = None
    encoded = b""

    def encode(reply: Any) -> bytes:
        nonlocal last, encoded
        if reply is not last:
            encoded, last = wire.encode(reply), reply
        return encoded

    return encode


async def _turn_away(context: grpc.aio.ServicerContext) -> None:
    why = "The token is missing or is not this job's."
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)  # always raises


async def _refuse(context: grpc.aio.ServicerContext, error: DLRoverError) -> Any:
    code = grpc.StatusCode.INTERNAL
    if isinstance(error, ProtocolError):
        code = grpc.StatusCode.INVALID_ARGUMENT
    elif isinstance(error, ConfigurationError):
        code = grpc.StatusCode.FAILED_PRECONDITION
    return await context.abort(code, str(error))  # always raises
