"""Notes the signals by which a program was asked to stop from outside, and which it handled.

A handler that leaves with an exit code, or sends the signal again once it has cleaned up, looks like a program that
ended by itself. Only handlers of Python in the worker's own process are noted. Only the standard library is imported
here.
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
"""Signals with which platforms, schedulers and people ask for a program's end."""
ASKED_WITHIN = 300.0
"""Seconds after such a signal in which a program's end is taken for its answer: a handler may only set a flag, and the
loop stores a checkpoint first."""


class Received:
    """The last such signal that the process with the number ``own`` got."""

    def __init__(self, own: int) -> None:
        self._own = own
        self._sent: set[int] = set()
        self._number = 0
        self._time = 0.0

    def sends_itself(self, number: int) -> None:
        """The program sends a signal to its own process: nobody asks for anything."""
        self._sent.add(number)

    def note(self, number: int) -> None:
        """A handler is about to be called, in this process or in a fork of it."""
        if os.getpid() != self._own:
            return
        if number in self._sent:
            self._sent.discard(number)
            return
        self._number, self._time = number, time.monotonic()

    def lately(self) -> int:
        """The number of the signal, if it came within `ASKED_WITHIN`; else 0."""
        return self._number if time.monotonic() - self._time < ASKED_WITHIN else 0

    def behind(self, frames: types.TracebackType | None) -> int:
        """The same, if the exception with these frames came up in the signal's handler."""
        while frames is not None:
            if frames.tb_frame.f_code is _Handler.__call__.__code__:
                return self.lately()
            frames = frames.tb_next
        return 0


class _Handler:
    """Stands for the program's handler of a signal."""

    def __init__(self, handler: Callable[..., Any], received: Received) -> None:
        self.handler = handler
        self._received = received

    def __call__(self, number: int, frame: types.FrameType | None) -> Any:
        self._received.note(number)
        return self.handler(number, frame)


def watch(received: Received) -> None:
    """Note from now on in ``received`` which signals the program's handlers get; it sees its own handlers as before."""
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
