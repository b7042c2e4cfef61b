"""The relay: forwards the workers' requests to the master, to which workers have no connection.

Its Unix socket in the abstract namespace is open to its own user only; see `dlrover.rpc.relayed`.
"""

from __future__ import annotations

import asyncio
import logging

from dlrover._util import framing
from dlrover.agent.localserver import LocalServer
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError
from dlrover.rpc import wire
from dlrover.rpc.client import MasterClient
from dlrover.spec.requests import Unanswered

logger = logging.getLogger(__name__)


class RequestRelay(LocalServer):
    """A server for the workers' requests."""

    def __init__(self, client: MasterClient) -> None:
        super().__init__("relay", self._relay)
        self._requests = client.requests()

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        self._requests.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._answer(reader, writer)
        except framing.FrameTooLongError as error:
            logger.warning("Closed a worker's connection: %s", error)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await framing.read(reader)
        try:
            reply = await self._requests.ask(request)
        except InfrastructureError as error:
            reply = wire.encode(Unanswered(away=str(error)))
        except (ProtocolError, ConfigurationError) as error:
            reply = wire.encode(Unanswered(refused=str(error)))
        writer.write(framing.pack(reply))
        await writer.drain()
