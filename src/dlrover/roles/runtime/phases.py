"""Which phase this process is in, and what progress it makes, as it reports them to the coordinator."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from dlrover import config, launched
from dlrover.roles.messages import IDLE, START, MemberPlace, Pulse

T = TypeVar("T")
SHORT_WAIT = 1.0
"""Seconds: a shorter wait does not interrupt the phase around it, so that one who polls for ever is found."""


class Phases:
    """Phases of the threads that count: those that take calls, and that of the program. Any thread may use it.

    The process is idle while all of them are, and otherwise in the phase that has lasted longest.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._threads: dict[int, list[tuple[str, float]]] = {}
        """Phases of each thread and when they began; the last one counts."""
        self._done = self._steps = 0
        self._moved = self._idle_since = self._counted = clock()
        self._worked = self._idled = 0.0

    def progress(self, count: int = 1) -> None:
        """Note progress."""
        with self._lock:
            self._done += count
            self._moved = self._clock()

    def set(self, name: str) -> None:
        """Change the phase of this thread, which counts from now on."""
        with self._lock:
            now = self._count()
            self._threads.setdefault(threading.get_ident(), [])[-1:] = [(name, now)]

    def leave(self) -> None:
        """Have this thread count no more."""
        with self._lock:
            self._idle_since = self._count()
            self._threads.pop(threading.get_ident(), None)

    @contextlib.contextmanager
    def entered(self, name: str, least: float = 0.0) -> Iterator[None]:
        """Be in a phase; then again in the one before, which begins anew if this lasted ``least`` seconds."""
        thread = threading.get_ident()
        with self._lock:
            began = self._count()
            self._threads.setdefault(thread, []).append((name, began))
        try:
            yield
        finally:
            with self._lock:
                phases, now = self._threads.get(thread, []), self._count()
                if phases[:-1]:
                    before, since = phases[-2]
                    phases[-2:] = [(before, now if now - began >= least else since)]
                else:
                    self._threads.pop(thread, None)
                    self._idle_since = now

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Be idle, if this thread counts."""
        known = threading.get_ident() in self._threads
        return self.entered(IDLE, SHORT_WAIT) if known else contextlib.nullcontext()

    def pulse(self, place: MemberPlace) -> Pulse:
        """Return the report for the coordinator."""
        steps, alive = launched.steps_made(), sys._current_frames()  # noqa: SLF001 - documented
        with self._lock:
            now = self._count()
            for thread in self._threads.keys() - alive.keys():
                del self._threads[thread]
                self._idle_since = now
            if steps != self._steps:
                self._steps, self._moved = steps, now
            since, name = self._current()
            done, still = self._done + self._steps, max(0.0, now - max(since, self._moved))
            return Pulse(place, name, now - since, still, done, self._worked, self._idled)

    def _current(self) -> tuple[float, str]:
        """Return the phase of the process, and when it began."""
        last = [phases[-1] for phases in self._threads.values()]
        busy = [(since, name) for name, since in last if name != IDLE]
        return min(busy) if busy else (max([self._idle_since, *(at for _, at in last)]), IDLE)

    def _count(self) -> float:
        """Count the seconds since the last call, all in one phase; call this before each change. Return the time."""
        now = self._clock()
        _, name = self._current()
        if name == IDLE:
            self._idled += now - self._counted
        elif name != START:
            self._worked += now - self._counted
        self._counted = now
        return now

    def stacks(self) -> str:
        """Return the stacks of the threads that count."""
        frames = sys._current_frames()  # noqa: SLF001 - documented
        found = [frames[thread] for thread in list(self._threads) if thread in frames]
        return "\n".join("".join(traceback.format_stack(frame)) for frame in found)


class Awaited(Future[T]):
    """A future; whoever waits for it is idle."""

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self._phases = phases

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, and return it."""
        with self._phases.waiting(), _timeouts():
            found = super().result(timeout)
        self._phases.progress()
        return found

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the exception if there was one."""
        with self._phases.waiting(), _timeouts():
            return super().exception(timeout)


@contextlib.contextmanager
def _timeouts() -> Iterator[None]:
    """Raise TimeoutError where Python 3.10 raises a class of its own, for futures."""
    try:
        yield
    except futures.TimeoutError as error:
        if isinstance(error, TimeoutError):
            raise
        raise TimeoutError(*error.args) from None


def end(reason: str, phases: Phases) -> None:
    """End this process, as if its program had raised an error where it is stuck."""
    text = f"NoProgressError: {reason}"
    stacks = f"{phases.stacks()}{text}\n"
    with contextlib.suppress(OSError):
        os.write(2, stacks.encode())
        if path := config.environ().get("TORCHELASTIC_ERROR_FILE"):
            extra: dict[str, Any] = {"py_callstack": stacks, "timestamp": str(int(time.time()))}
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    os._exit(1)
