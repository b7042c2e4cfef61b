"""The events of a job's masters, copied into the directory of the command that started the job."""

from __future__ import annotations

from pathlib import Path

from dlrover._util import decoding
from dlrover.master.journal.history import History, known_before
from dlrover.spec.events import Event


class CopiedEvents:
    """One history of all masters of a job: one on another machine than the last has no journal, and begins anew.

    Attributes:
        of: Which master's history the position is in: its first line; empty: none yet.
        position: Bytes of it that are copied.
    """

    def __init__(self, path: Path) -> None:
        self._history = History(path)
        self._history.follow(self._history.recorded)
        self._before = 0
        self.of, self.position = b"", 0

    def add(self, of: bytes, lines: bytes) -> None:
        """Add lines of the history that begins with the line ``of``; they follow `position`, unless it is another one."""
        found = [decoding.json(line, Event) for line in lines.splitlines()]
        if found and of != self.of:
            self.of, self.position = of, 0
            self._before = known_before(self._history.events, found[0])
        self.position += len(lines)
        for event in found:
            if self._before + event.seq > len(self._history.events):
                self._history.add(event.body, event.time)

    def close(self) -> None:
        """Close the file."""
        self._history.close()
