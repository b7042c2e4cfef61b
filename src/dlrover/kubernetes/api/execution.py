"""A command in a container of a pod that runs: its streams, over one connection to the API server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping

from dlrover._util import decoding
from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api.client import PODS, Client
from dlrover.kubernetes.resources.types import Manifest

PROTOCOL = "v4.channel.k8s.io"
"""The first byte of each message is its channel: 0 to 2 are the command's streams, 3 is how it ended."""
SILENCE = 60.0
"""Seconds without any output after which the connection counts as lost."""
LARGEST = 16 << 20
"""Most bytes of a message."""
PIECE = 64 * 1024
"""Most bytes that are read at once."""


class CommandError(InfrastructureError):
    """A command that failed, with the end of what it wrote to its standard error."""

    def __init__(self, message: str, stderr: str) -> None:
        super().__init__(message)
        self.stderr = stderr


@contextlib.asynccontextmanager
async def execute(
    client: Client, namespace: str, pod: str, container: str, command: Sequence[str]
) -> AsyncIterator[Execution]:
    """Run a command. Its standard input ends with the block.

    Raises:
        ApiError: 403 without the right to ``pods/exec``; 404 if there is no such pod.
        InfrastructureError: the connection broke.
    """
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), "true")
    query = {"container": container, "command": list(command), **streams}
    headers = {
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": base64.b64encode(secrets.token_bytes(16)).decode(),
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": PROTOCOL,
    }
    async with client.upgrade(PODS.path(namespace, pod, "exec"), query, headers) as stream:
        yield Execution(stream)


class Execution:
    """A command that runs."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._socket = Connection(ConnectionType.CLIENT)
        self._writing = asyncio.Lock()
        self._stderr = b""

    async def send(self, data: bytes) -> None:
        """Write to the command's standard input."""
        await self._write(BytesMessage(b"\0" + data))

    async def output(self) -> AsyncIterator[bytes]:
        """Yield what the command writes to its standard output, until it ends.

        Raises:
            CommandError: it failed.
            InfrastructureError: the connection broke, or nothing came for `SILENCE` seconds.
        """
        async for channel, content in self._messages():
            match channel:
                case 1 if content:  # each channel begins with an empty message
                    yield content
                case 2:
                    self._stderr = (self._stderr + content)[-PIECE:]
                case 3 if content:
                    self._check(content)
                    return

    async def _messages(self) -> AsyncIterator[tuple[int, bytes]]:
        message = bytearray()
        while True:
            data = await self._stream.read(PIECE, timeout=SILENCE)
            self._socket.receive_data(data or None)
            for event in self._socket.events():
                match event:
                    case BytesMessage(data=piece, message_finished=whole):
                        message += piece
                        if len(message) > LARGEST:
                            raise InfrastructureError("The pod sends too large a message.")
                        if whole:
                            if message:
                                yield message[0], bytes(message[1:])
                            message = bytearray()
                    case Ping():
                        await self._write(event.response())
                    case CloseConnection(reason=reason):
                        raise InfrastructureError(
                            f"The connection to the pod has ended. {reason or ''}".rstrip()
                        )

    def _check(self, content: bytes) -> None:
        try:
            status = decoding.json(content, Manifest)
        except msgspec.DecodeError:
            status = {"message": "the API server does not say how the command ended"}
        if status.get("status") != "Success":
            raise CommandError(status.get("message") or "", self._stderr.decode(errors="replace"))

    async def _write(self, event: Event) -> None:
        async with self._writing:
            await self._stream.write(self._socket.send(event), timeout=SILENCE)
