"""Waiting for an event, with a time limit."""

from __future__ import annotations

import asyncio


def renewed(event: asyncio.Event) -> asyncio.Event:
    """Wake all tasks that wait for ``event``; return the event for those that wait from now on."""
    event.set()
    return asyncio.Event()


async def waited(event: asyncio.Event, seconds: float) -> None:
    """Wait for ``event``, at most ``seconds``."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return
