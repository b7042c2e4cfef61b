"""A server for other processes of this machine and user, on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from dlrover._util.sockets import peer

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class LocalServer:
    """A server on a Unix socket in the abstract namespace, open to its own user only.

    It listens while used as an async context manager, and closes its connections at the end.

    Args:
        name: What it is for, in its address.
        serve: Serves one connection, to its end.
    """

    def __init__(self, name: str, serve: Serve) -> None:
        self.address = f"dlrover-{name}-{os.getuid()}-{uuid.uuid4().hex}"
        """Address of the socket, without the leading NUL."""
        self.open: set[asyncio.StreamWriter] = set()
        """Connections that are being served."""
        self._serve = serve
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, f"\0{self.address}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self.open:
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        if peer(sock).uid != os.getuid():
            logger.warning("Refused a process of another user on the workers' socket")
            writer.close()
            return
        self.open.add(writer)
        try:
            with contextlib.suppress(ConnectionError):
                await self._serve(reader, writer)
        finally:
            self.open.discard(writer)
            writer.close()
