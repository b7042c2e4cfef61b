"""A client's connection to one server: single calls with a deadline, and the errors for their failures."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import grpc
import grpc.aio
import msgspec

from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError, ProtocolError
from dlrover.rpc import wire
from dlrover.spec.jobdir import TlsFiles

if TYPE_CHECKING:
    from typing_extensions import Self

REQUEST_TIMEOUT = 10.0
"""Default timeout of a request in seconds."""

CUT = "Internal error from Core"
"""gRPC's own details, with the code of a failed server, of a write on a stream whose connection has ended; some versions
add a full stop."""


class Connection:
    """A connection to the server at ``address`` (``host:port``). Use it as an async context manager.

    A request may take ``timeout`` seconds, in addition to any wait that it asks for itself.

    Every call raises

    - `InfrastructureError` if the server fails or cannot be reached within the time limit,
    - `ConfigurationError` if it refuses the token or the request,
    - `ProtocolError` if it does not understand the message, or refuses it because of a limit.
    """

    service: ClassVar[str] = wire.SERVICE
    peer: ClassVar[str] = "The master at"
    """First words of error messages; the address follows."""

    def __init__(
        self,
        address: str,
        token: str,
        tls: TlsFiles | None = None,
        timeout: float = REQUEST_TIMEOUT,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._metadata = ((wire.TOKEN_KEY, wire.checked_token(token)),)
        self._credentials = wire.channel_credentials(tls) if tls else None
        self._server_name = tls.server_name if tls else ""
        self._channel = self._open(address)

    def _open(self, address: str) -> grpc.aio.Channel:
        options: list[tuple[str, int | str]] = [*wire.CLIENT_OPTIONS]
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

    async def _call(
        self, method: str, request: msgspec.Struct, reply: Any, wait: float = 0.0
    ) -> Any:
        return wire.decode(await self._forward(method, wire.encode(request), wait), reply)

    async def _forward(self, method: str, request: bytes, wait: float = 0.0) -> bytes:
        """Call a method with an encoded request and return the encoded reply."""
        call = self._channel.unary_unary(f"/{self.service}/{method}")
        try:
            data: bytes = await call(request, metadata=self._metadata, timeout=self._timeout + wait)
        except grpc.aio.AioRpcError as error:
            self._fail(error)
        return data

    async def _follow(
        self, method: str, request: msgspec.Struct, reply: Any, timeout: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """Call a method with a stream of replies and yield them; ``timeout`` limits the whole stream, in seconds."""
        call = self._channel.unary_stream(f"/{self.service}/{method}")(
            wire.encode(request), metadata=self._metadata, timeout=timeout
        )
        try:
            async for data in call:
                yield wire.decode(data, reply)
        except grpc.aio.AioRpcError as error:
            self._fail(error)
        finally:
            call.cancel()

    def _fail(self, error: grpc.aio.AioRpcError) -> NoReturn:
        """Raise the DLRover error for a failed call."""
        raise self._described(error) from error

    def _described(self, error: grpc.aio.AioRpcError) -> DLRoverError:
        """Return the DLRover error for a failed call."""
        code, details = error.code(), error.details() or ""
        server = f"{self.peer} {self.address}"
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return ConfigurationError(f"{server} refused the connection: {details}")
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
            return ProtocolError(f"{server} did not understand a message: {details}")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            most = wire.MAX_REPLY_BYTES >> 20
            is_reply = details.startswith("SERVER: Sent")
            what = f"has a reply of more than {most} MiB; ask for less."
            return ProtocolError(
                f"{server} {what if is_reply else f'refused a message: {details}'}"
            )
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return ConfigurationError(details)
        if details.rstrip(".") == CUT:
            return InfrastructureError(f"{server} cannot be reached: the connection has ended.")
        failed = code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        return InfrastructureError(
            f"{server} {'failed' if failed else 'cannot be reached'}: "
            f"{_reason(details or code.name).rstrip('.')}."
        )


def _reason(details: str) -> str:
    """Return gRPC's reason for a failed connection, such as ``Connection refused``, without the addresses."""
    _, tried, last = details.partition("last error: ")
    if "handshake failed" in last:
        return last[last.index("handshake failed") :].removesuffix(": OK")
    return last.rpartition(": ")[2] if tried else details
