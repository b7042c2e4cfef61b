"""Virtual time: an asyncio event loop that never waits, but goes on to its next timer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

Range = tuple[float, float]
"""Bounds in seconds of a random time."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose clock starts at 0; what would run in a thread runs at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._clock_resolution = math.ulp(0.0)  # no timer runs early
        self._selector = self
        self.until: Callable[[], bool] | None = None
        """Condition that ends `run_forever`."""

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen"
        if timeout > 0:
            self._now = self._scheduled[0].when()
            self._clock_resolution = math.ulp(self._now)
        return []

    def _process_events(self, _events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _run_once(self) -> None:
        super()._run_once()
        if self.until is not None and self.until():
            self.stop()

    def run_in_executor(self, _executor: Any, call: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(call(*args))
        except Exception as error:  # noqa: BLE001 - it is raised in the caller
            future.set_exception(error)
        return future


class Time:
    """Virtual clock of one simulation, and its source of randomness."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.loop = VirtualLoop()
        self.error: BaseException | None = None
        """The first error in the simulation; it ends the run and is raised from it."""
        self.loop.set_exception_handler(lambda _, context: self.fail(context))

    @property
    def now(self) -> float:
        """Seconds since the simulation began."""
        return self.loop.time()

    def draw(self, delay: float | Range) -> float:
        """Return ``delay``: seconds, or a random time within bounds."""
        return self.random.uniform(*delay) if isinstance(delay, tuple) else delay

    def after(self, delay: float | Range, action: Callable[..., None], *args: Any) -> None:
        """Schedule an action after ``delay``."""
        self.loop.call_later(self.draw(delay), action, *args)

    def fail(self, context: dict[str, Any]) -> None:
        """End the run with an error that no task handles."""
        if self.error is None:
            self.error = context.get("exception") or RuntimeError(context["message"])
        self.loop.stop()

    def run(self, until: float, condition: Callable[[], bool] | None = None) -> None:
        """Advance to time ``until``, or until ``condition`` holds; check it after each happening."""
        end = self.loop.call_at(until, self.loop.stop)
        self.loop.until = condition
        try:
            self.loop.run_forever()
        finally:
            end.cancel()
            self.loop.until = None
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Let the code in this context act as part of the running loop."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self.loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)

    def close(self) -> None:
        """End all tasks; cancel again those that were just about to go on."""
        self.loop.set_exception_handler(lambda _loop, _context: None)
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
