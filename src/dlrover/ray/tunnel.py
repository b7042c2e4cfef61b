"""A way to a master's port through its actor: a port of this machine whose bytes travel in calls of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import ray

from dlrover.ray import cluster

READ = 1 << 18


class Tunnel:
    """Listens on a port of this machine for as long as this process lives, on a thread of its own."""

    def __init__(self, master: str) -> None:
        self._master = master
        self._ready = threading.Event()
        self.port = 0
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait()

    @property
    def address(self) -> str:
        """The address for clients of the master."""
        return f"127.0.0.1:{self.port}"

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ray.exceptions.RayError), contextlib.closing(writer):
            actor = cluster.actor(self._master)
            if actor is None:
                return
            number = await _call(actor.open.remote())
            up = asyncio.create_task(_up(reader, actor, number))
            try:
                while data := await _call(actor.receive.remote(number)):
                    writer.write(data)
                    await writer.drain()
            finally:
                up.cancel()


async def _up(reader: asyncio.StreamReader, actor: Any, number: int) -> None:
    with contextlib.suppress(OSError, ray.exceptions.RayError):
        while data := await reader.read(READ):
            await _call(actor.send.remote(number, data))
        await _call(actor.send.remote(number, b""))


async def _call(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())
