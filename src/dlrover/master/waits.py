"""Waiting for something that happens, for a while."""

from __future__ import annotations

import asyncio


def renewed(event: asyncio.Event) -> asyncio.Event:
    """Wake everybody who waits for ``event``; the event for those who wait from now on."""
    event.set()
    return asyncio.Event()


async def waited(event: asyncio.Event, seconds: float) -> None:
    """Wait for ``event``, ``seconds`` at most."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return
