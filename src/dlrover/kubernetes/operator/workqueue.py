"""A queue of keys to process, each at most once and never by two consumers at a time."""

from __future__ import annotations

import asyncio
import time

from dlrover.kubernetes.operator.stats import Durations


class WorkQueue:
    """A queue for one event loop; a key added while it is processed returns afterwards.

    If given, ``waits`` collects each key's waiting time.
    """

    def __init__(self, waits: Durations | None = None) -> None:
        self._waits = waits
        self._waiting: dict[str, float] = {}
        self._active: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._filled = asyncio.Event()

    def add(self, key: str) -> None:
        """Queue a key as soon as possible."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        self._waiting.setdefault(key, time.monotonic())
        self._filled.set()

    def add_after(self, key: str, seconds: float) -> None:
        """Queue a key after ``seconds`` unless it is due earlier."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        timer = self._timers.get(key)
        if key in self._waiting or (timer is not None and timer.when() <= due):
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(due, self.add, key)

    async def get(self) -> str:
        """Wait for the next key and return it; call `done` after processing it."""
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
        """Number of waiting keys."""
        return len(self._waiting)

    def done(self, key: str) -> None:
        """Mark a key as processed."""
        self._active.discard(key)
        if key in self._waiting:
            self._filled.set()

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
