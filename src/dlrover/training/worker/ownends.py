"""A record of a program's end by its own act: ``os._exit``, ``os.abort`` or a signal to itself.

An observer of the process's end cannot tell who sent the signal. Only the worker's own process is watched,
not its children, and only calls from Python. The module imports only the standard library and this package.
"""

from __future__ import annotations

import functools
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from dlrover.training.worker.received import ASKING, Received

_OURS = os.path.dirname(__file__)
"""Directory of this package; its frames are left out of the recorded stack."""
_DEADLY = frozenset(signal.Signals) - {
    signal.SIGCHLD, signal.SIGCONT, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
    signal.SIGURG, signal.SIGWINCH,
}  # fmt: skip
"""Signals that end a process without a handler."""


def watch(note: Callable[[dict[str, Any]], None], received: Received) -> None:
    """Call ``note`` with a record in torch's format before this process ends itself.

    ``received`` ignores the signals that the process sends to itself and handles.
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
