"""A log file for a process that continues when its disk is full."""

from __future__ import annotations

import logging
import sys
from pathlib import Path


class LogFile(logging.FileHandler):
    """A log file that drops records while its disk is full, and notes the loss once there is space again."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._full = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        was_full, self._full = self._full, False
        super().emit(record)
        if was_full and not self._full and self.stream is not None:
            self.stream.write("The disk was full: lines before this one may be missing.\n")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Note that a record could not be written."""
        if isinstance(sys.exc_info()[1], OSError):
            self._full = True
        else:
            super().handleError(record)


def log_to(path: Path) -> None:
    """Log this process's records to a file."""
    logging.basicConfig(
        handlers=[LogFile(path)],
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
