"""The job's events as a stream, for whoever follows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from dlrover.master.journal.history import History
from dlrover.rpc.server import Server
from dlrover.spec.events import Event

BATCH_BYTES = 1024 * 1024
"""Maximum size of the events in one item."""


class EventsRequest(msgspec.Struct, frozen=True, array_like=True, tag="events"):
    """Request for the events after number ``since``, and for those to come."""

    since: int = 0


class Events(msgspec.Struct, frozen=True, array_like=True):
    """Some events, in their order; none at the beginning."""

    events: tuple[Event, ...]


class EventStream:
    """Streams the events of a history, until it is closed."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._changed = asyncio.Event()
        self._closed = False
        history.listeners.append(lambda _event: self._wake())

    def register(self, server: Server) -> None:
        """Register the method that users call."""
        server.server_stream("RoleEvents", EventsRequest, self._stream)

    def close(self) -> None:
        """End all streams after the last event."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _stream(self, request: EventsRequest) -> AsyncIterator[Events]:
        since = max(0, request.since)
        yield Events(())  # the stream is open
        while True:
            changed = self._changed
            if fresh := self._history.batch(since, BATCH_BYTES):
                since += len(fresh)
                yield Events(fresh)
            elif self._closed:
                return
            else:
                await changed.wait()
