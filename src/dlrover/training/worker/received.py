"""A record of the signals that asked a program to stop and that the program handled.

A handler that exits with a code, or sends the signal again after its cleanup, looks like a program that
ended by itself. Only Python handlers in the worker's own process are recorded. The module imports only the
standard library.
"""

from __future__ import annotations

import functools
import os
import signal
import time
import types
from collections.abc import Callable
from typing import Any

ASKING = frozenset(
    {
        signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
    }
)  # fmt: skip
"""Signals by which platforms, schedulers and users ask a program to end."""
ASKED_WITHIN = 300.0
"""Seconds after such a signal in which a program's end counts as its effect: a handler may only set a flag,
and the loop then saves a checkpoint first."""


class Received:
    """The last such signal that the process with pid ``own`` received."""

    def __init__(self, own: int) -> None:
        self._own = own
        self._sent: set[int] = set()
        self._number = 0
        self._time = 0.0

    def sends_itself(self, number: int) -> None:
        """Ignore the next signal ``number``, which the program sends to itself."""
        self._sent.add(number)

    def note(self, number: int) -> None:
        """Record a signal before its handler runs, in the own process only."""
        if os.getpid() != self._own:
            return
        if number in self._sent:
            self._sent.discard(number)
            return
        self._number, self._time = number, time.monotonic()

    def lately(self) -> int:
        """Return the number of the last signal if it came within `ASKED_WITHIN`; else 0."""
        return self._number if time.monotonic() - self._time < ASKED_WITHIN else 0

    def behind(self, frames: types.TracebackType | None) -> int:
        """Return `lately` if the exception with these frames arose in a signal handler; else 0."""
        while frames is not None:
            if frames.tb_frame.f_code is _Handler.__call__.__code__:
                return self.lately()
            frames = frames.tb_next
        return 0


class _Handler:
    """A wrapper of the program's handler of a signal."""

    def __init__(self, handler: Callable[..., Any], received: Received) -> None:
        self.handler = handler
        self._received = received

    def __call__(self, number: int, frame: types.FrameType | None) -> Any:
        self._received.note(number)
        return self.handler(number, frame)


def watch(received: Received) -> None:
    """Record in ``received`` the signals that the program's handlers get; wrap those handlers invisibly."""
    set_handler, get_handler = signal.signal, signal.getsignal

    @functools.wraps(set_handler)
    def noting(signalnum: Any, handler: Any) -> Any:
        own = callable(handler) and handler is not signal.default_int_handler
        if own and signalnum in ASKING and not isinstance(handler, (_Handler, signal.Handlers)):
            handler = _Handler(handler, received)
        return _programs(set_handler(signalnum, handler))

    @functools.wraps(get_handler)
    def getting(signalnum: Any) -> Any:
        return _programs(get_handler(signalnum))

    signal.signal, signal.getsignal = noting, getting


def _programs(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Handler) else handler
