"""Asyncio tasks: in the background, waiting for an event, and cancelled for sure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

AGAIN = 0.5
"""Seconds after which a task that goes on is cancelled again."""
ATTEMPTS = 20
"""Cancellations of a task before it is left behind."""


def start(work: Coroutine[Any, Any, T], among: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Run a coroutine as a task that ``among`` holds until it is done; an exception in it is logged."""
    task = asyncio.create_task(work)
    among.add(task)

    def done(task: asyncio.Task[T]) -> None:
        among.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("Defect in a background task", exc_info=task.exception())

    task.add_done_callback(done)
    return task


async def signalled(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most ``seconds``; return whether it is set.

    A cancellation that comes just after the event is never lost. Before Python 3.12, `asyncio.wait_for` loses it.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()
    return event.is_set()


async def stop(running: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, whatever they return or raise.

    A task that goes on is cancelled again: libraries may lose a cancellation as `asyncio.wait_for` does. One that has
    lost `ATTEMPTS` of them is left behind with an error in the log.
    """
    left = set(running)
    for _ in range(ATTEMPTS):
        if not left:
            return
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=AGAIN)
        for task in done:
            if not task.cancelled():
                task.exception()  # else asyncio logs that nothing has asked for it
    for task in left:
        logger.error("A background task does not end: %r", task)
