"""The requests of workers, which their agents relay in frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from dlrover.errors import DLRoverError, InfrastructureError, ProtocolError
from dlrover.rpc import messages, wire
from dlrover.rpc.batches import FRAME_BYTES
from dlrover.spec.requests import Unanswered, WorkerReply, WorkerRequest

Begun: TypeAlias = WorkerReply | asyncio.Future[WorkerReply]
Use: TypeAlias = Callable[[WorkerRequest], Begun]


async def answers(
    frame: messages.RequestFrame,
    use: Use,
) -> list[messages.RequestFrame]:
    """Return the replies to a frame's requests, in as many frames as their sizes need.

    ``use`` begins with a request and returns its reply, at once or to come. All requests of a frame begin before
    the first one is waited for, so that the journal gets them together. A request that cannot be read, or
    whose reply is an error, fails alone.
    """
    begun = [(number, _begin(body, use)) for number, body in frame.records]
    frames: list[list[messages.Record]] = [[]]
    size = 0
    for number, reply in begun:
        body = wire.encode(await _outcome(reply))
        size += len(body)
        if frames[-1] and size > FRAME_BYTES:
            frames.append([])
            size = len(body)
        frames[-1].append(messages.Record(number, body))
    return [messages.RequestFrame(tuple(records)) for records in frames]


def _begin(body: bytes, use: Use) -> Begun:
    try:
        return use(wire.decode(body, WorkerRequest))
    except ProtocolError as error:
        return Unanswered(refused=f"The master did not understand a message: {error}")


async def _outcome(reply: Begun) -> WorkerReply:
    if not isinstance(reply, asyncio.Future):
        return reply
    try:
        return await reply
    except InfrastructureError as error:
        return Unanswered(away=f"The master failed: {error}")
    except DLRoverError as error:
        return Unanswered(refused=str(error))
