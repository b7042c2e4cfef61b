"""Directories for checkpoints whose savers are gone when the test is over."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from tests.waiting import until


class Directory(type(Path())):
    """A checkpoint directory that knows its savers."""

    def savers(self) -> list[psutil.Process]:
        """The savers that serve it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "--identity" in words and str(self) in words:
                    found.append(process)
        return found

    def stop_saver(self) -> None:
        """Ask the saver to leave, and wait until it has."""
        for process in self.savers():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        self.until_no_saver()

    def until_no_saver(self, timeout: float = 15.0) -> None:
        """Wait until the saver has left by itself."""
        until(lambda: not self.savers(), timeout, "the saver's end")

    def kill_savers(self) -> None:
        """End the savers, of directories in this one too, at once."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "--identity" in words and any(str(self) in word for word in words):
                    process.kill()
