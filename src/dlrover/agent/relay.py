"""The relay: forwards the workers' shard requests to the master, to which workers have no connection.

Its Unix socket in the abstract namespace is open to its own user only; see `dlrover.data.dealers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from typing import TYPE_CHECKING

import msgspec

from dlrover._util.sockets import peer
from dlrover.data.dealers import LENGTH, MAX_FRAME
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError
from dlrover.rpc import wire
from dlrover.rpc.client import MasterClient
from dlrover.spec.shards import ShardReply, ShardRequest

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


class Relay:
    """A server for the workers' shard requests; it listens while used as an async context manager."""

    def __init__(self, client: MasterClient) -> None:
        self._client = client
        self.address = f"dlrover-relay-{os.getuid()}-{uuid.uuid4().hex}"
        """Address of the socket, without the leading NUL."""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, f"\0{self.address}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            sock: socket.socket = writer.get_extra_info("socket")
            if peer(sock).uid != os.getuid():
                logger.warning("A process of another user was turned away from the workers' socket")
                return
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await self._answer(reader, writer)
        except ProtocolError as error:
            logger.warning("A worker is cut off: %s", error)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MAX_FRAME:
            raise ProtocolError(f"A message has {length} bytes; {MAX_FRAME} are accepted.")
        data = msgspec.msgpack.encode(await self._asked(await reader.readexactly(length)))
        writer.write(LENGTH.pack(len(data)) + data)
        await writer.drain()

    async def _asked(self, data: bytes) -> ShardReply:
        try:
            request: ShardRequest = wire.decode(data, ShardRequest)
            return await self._client.shards(request)
        except InfrastructureError as error:
            return ShardReply(away=str(error))
        except (ProtocolError, ConfigurationError) as error:
            return ShardReply(refused=str(error))
