"""Work in a fork of the test's process, which ends whatever happens and whose exception fails the test."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

import pytest

Value = TypeVar("Value")
PR_SET_PDEATHSIG = 1


class Child(Generic[Value]):
    """A fork that does some work. It never returns into the test."""

    def __init__(self, work: Callable[[], Value], within: int = 30) -> None:
        """Fork; the kernel ends the child if it still runs after ``within`` seconds."""
        self._within = within
        self._code: int | None = None
        self._answer = b""
        self._file = os.memfd_create("answer")  # a pipe would stay open in processes of the child
        self.pid = os.fork()
        if not self.pid:
            self._live(work)

    def end(self) -> int:
        """Wait for the end; 0, or the negative number of the signal that ended it. Fails as the work failed."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            with open(self._file, "rb") as file:
                self._answer = file.read()
        if self._code == -signal.SIGALRM:
            pytest.fail(f"A fork still ran after {self._within} s.")
        if self._code > 0:
            pytest.fail(f"In a fork, which ended with {self._code}:\n{self._answer.decode()}")
        return self._code

    def result(self) -> Value:
        """Wait for the end; what the work returned."""
        code = self.end()
        assert code == 0, f"{signal.Signals(-code).name} ended a fork"
        return pickle.loads(self._answer)

    def _live(self, work: Callable[[], Value]) -> NoReturn:
        code = 1
        try:
            # It holds the pipe through which pytest-xdist hears of the end of the test's process.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(self._within)
            try:
                answer = pickle.dumps(work())
                code = 0
            except BaseException:  # noqa: BLE001 - the test shows it
                answer = traceback.format_exc().encode()
            os.pwrite(self._file, answer, 0)
        finally:
            os._exit(code)
