"""The sign of life of a master or a coordinator of roles, for the liveness probe of its pod."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from dlrover.spec.jobdir import liveness_socket

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def answering(port: int) -> AsyncIterator[None]:
    """Answer each connection to the liveness socket of the process on ``port`` with a byte.

    The event loop answers: it does not if it, or the whole process, stands still.
    """
    try:
        server = await asyncio.start_unix_server(_answer, liveness_socket(port))
    except OSError as error:  # one with another address has the port, and the socket
        logger.info("No liveness probe can be answered: %s", error)
        yield
        return
    try:
        yield
    finally:
        server.close()


async def _answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"1")
    writer.close()
