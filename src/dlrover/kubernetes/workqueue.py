"""Keys that wait to be worked on: each at most once, and never by two at a time."""

from __future__ import annotations

import asyncio
import time

from dlrover.kubernetes.stats import Durations


class WorkQueue:
    """For one event loop. A key that is added while it is worked on comes again afterwards.

    ``waits``, if given, takes the time that each key waits.
    """

    def __init__(self, waits: Durations | None = None) -> None:
        self._waits = waits
        self._waiting: dict[str, float] = {}
        self._active: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._filled = asyncio.Event()

    def add(self, key: str) -> None:
        """Have a key worked on as soon as possible."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        self._waiting.setdefault(key, time.monotonic())
        self._filled.set()

    def add_after(self, key: str, seconds: float) -> None:
        """Have a key worked on after so many seconds, or earlier if it was to be."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        timer = self._timers.get(key)
        if key in self._waiting or (timer is not None and timer.when() <= due):
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(due, self.add, key)

    async def get(self) -> str:
        """The next key; call `done` when it has been worked on."""
        while True:
            for key in self._waiting:
                if key not in self._active:
                    since = self._waiting.pop(key)
                    self._active.add(key)
                    if self._waits is not None:
                        self._waits.add(time.monotonic() - since)
                    return key
            self._filled.clear()
            await self._filled.wait()

    @property
    def depth(self) -> int:
        """Keys that wait."""
        return len(self._waiting)

    def done(self, key: str) -> None:
        """A key has been worked on."""
        self._active.discard(key)
        if key in self._waiting:
            self._filled.set()

    def close(self) -> None:
        """Forget all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
