"""The relay: forwards the workers' requests to the master, to which workers have no connection.

Its Unix socket in the abstract namespace is open to its own user only; see `dlrover.rpc.relayed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from typing import TYPE_CHECKING

from dlrover._util import framing
from dlrover._util.sockets import peer
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError
from dlrover.rpc import wire
from dlrover.rpc.client import MasterClient
from dlrover.spec.requests import Unanswered

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


class RequestRelay:
    """A server for the workers' requests; it listens while used as an async context manager."""

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
                logger.warning("Refused a process of another user on the workers' socket")
                return
            with contextlib.suppress(ConnectionError):
                while True:
                    await self._answer(reader, writer)
        except framing.FrameTooLongError as error:
            logger.warning("Closed a worker's connection: %s", error)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await framing.read(reader)
        try:
            reply = await self._client.forward(request)
        except InfrastructureError as error:
            reply = wire.encode(Unanswered(away=str(error)))
        except (ProtocolError, ConfigurationError) as error:
            reply = wire.encode(Unanswered(refused=str(error)))
        writer.write(framing.pack(reply))
        await writer.drain()
