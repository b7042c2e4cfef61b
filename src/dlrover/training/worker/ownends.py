"""Records of a program's end by its own act, and of the signals that asked it to stop and that it handled.

An observer of the process's end cannot tell who sent a signal. A handler that exits with a code, or sends the signal
again after its cleanup, looks like a program that ended by itself: ``os._exit``, ``os.abort`` or a signal to itself. Only
the worker's own process is watched, not its children, and only calls and handlers of Python. The module imports only
the standard library.
"""

from __future__ import annotations

import functools
import os
import signal
import time
import traceback
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
        self.leaves = 0
        """Number of such a signal whose handler runs, or has raised an error to end the program; else 0."""
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
        self.leaves = number

    def lately(self) -> int:
        """Return the number of the last signal if it came within `ASKED_WITHIN`; else 0."""
        return self._number if time.monotonic() - self._time < ASKED_WITHIN else 0

    def behind(self, frames: types.TracebackType | None) -> int:
        """Return `lately` if the exception with these frames arose in a signal handler; else 0."""
        while frames is not None:
            if frames.tb_frame.f_code is _NotedHandler.__call__.__code__:
                return self.lately()
            frames = frames.tb_next
        return 0


class _NotedHandler:
    """A wrapper of the program's handler of a signal."""

    def __init__(self, handler: Callable[..., Any], received: Received) -> None:
        self.handler = handler
        self._received = received

    def __call__(self, number: int, frame: types.FrameType | None) -> Any:
        self._received.note(number)
        result = self.handler(number, frame)
        self._received.leaves = 0
        return result


def watch_signals(received: Received) -> None:
    """Record in ``received`` the signals that the program's handlers get; wrap those handlers invisibly."""
    set_handler, get_handler = signal.signal, signal.getsignal

    @functools.wraps(set_handler)
    def noting(signalnum: Any, handler: Any) -> Any:
        own = callable(handler) and handler is not signal.default_int_handler
        if (
            own
            and signalnum in ASKING
            and not isinstance(handler, (_NotedHandler, signal.Handlers))
        ):
            handler = _NotedHandler(handler, received)
        return _programs(set_handler(signalnum, handler))

    @functools.wraps(get_handler)
    def getting(signalnum: Any) -> Any:
        return _programs(get_handler(signalnum))

    signal.signal, signal.getsignal = noting, getting


def _programs(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _NotedHandler) else handler


_OURS = os.path.dirname(__file__)
"""Directory of this package; its frames are left out of the recorded stack."""
_DEADLY = frozenset(signal.Signals) - {
    signal.SIGCHLD, signal.SIGCONT, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
    signal.SIGURG, signal.SIGWINCH,
}  # fmt: skip
"""Signals that end a process without a handler."""


def watch(
    note: Callable[[dict[str, Any]], None], received: Received, finish: Callable[[], int] = int
) -> None:
    """Call ``note`` with a record in torch's format before this process ends itself.

    ``received`` ignores the signals that the process sends to itself and handles. ``finish`` is called before the process ends
    at once with 0; it returns the exit code to end with.
    """
    own = os.getpid()

    def watched(module: Any, name: str, ends: Callable[..., bool]) -> None:
        function = getattr(module, name)

        @functools.wraps(function)
        def noting(*args: Any, **named: Any) -> Any:
            if os.getpid() == own and ends(*args, **named):
                call = f"{module.__name__}.{name}"
                frames = traceback.extract_stack()[:-1]
                stack = traceback.format_list(
                    [f for f in frames if os.path.dirname(f.filename) != _OURS]
                )
                header = "Traceback (most recent call last):\n"
                words = f"{call}: {', '.join(map(str, args))}"
                trace = f"{header}{''.join(stack)}{words}\n"
                note(record(call, words, trace, received.lately()))
            return function(*args, **named)

        setattr(module, name, noting)

    watched(os, "_exit", lambda status=0: status != 0)
    leave = os._exit

    @functools.wraps(leave)
    def leaving(status: int = 0) -> None:
        leave(status or (finish() if os.getpid() == own else 0))

    os._exit = leaving  # type: ignore[assignment]
    watched(os, "abort", lambda: True)

    def kills(number: int) -> bool:
        deadly = _kills(number)
        if number in ASKING and callable(signal.getsignal(number)):
            received.sends_itself(number)
        return deadly

    watched(os, "kill", lambda pid=0, number=0: pid in (own, 0) and kills(number))
    watched(signal, "raise_signal", kills)


def _kills(number: int) -> bool:
    if number not in _DEADLY:
        return False
    return number == signal.SIGKILL or signal.getsignal(number) is signal.SIG_DFL


def record(error: str, message: str, stack: str, handled_signal: int = 0) -> dict[str, Any]:
    """Describe a program's end in the format of torch's error files, with the exact time.

    ``handled_signal`` is the signal that asked it to end; 0: none.
    """
    now = time.time()
    extra: dict[str, Any] = {"py_callstack": stack, "timestamp": str(int(now)), "time": now}
    if handled_signal:
        extra["handled_signal"] = handled_signal
    return {"message": {"message": message, "errorType": error, "extraInfo": extra}}
