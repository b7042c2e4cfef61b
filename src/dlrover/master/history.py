"""The job's events: numbered, kept in memory for watchers and in ``events.jsonl`` for everybody."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from dlrover.spec.events import Event, EventBody

logger = logging.getLogger(__name__)


class History:
    """Appends events to a file, one JSON object a line.

    Replaying the journal produces the same events again; those that the file already has are not
    written twice.
    """

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = []
        self.listeners: list[Callable[[Event], None]] = []
        """Called with each event that is added from now on."""
        self._written = _complete_lines(path)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def add(self, body: EventBody, time: float) -> Event:
        """Number an event and keep it."""
        event = Event(len(self.events) + 1, time, body)
        self.events.append(event)
        if event.seq > self._written:
            self._unwritten += msgspec.json.encode(event) + b"\n"
            self._write()
        for listener in self.listeners:
            listener(event)
        return event

    def _write(self) -> None:
        """Write what is to be written; what a full disk does not take now is kept for the next time."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            logger.warning("Events cannot be written: %s", error)

    def batch(self, since: int, limit: int) -> tuple[Event, ...]:
        """The events after number ``since`` that fit into ``limit`` bytes on the wire, one at least."""
        size = 0
        end = since
        for event in itertools.islice(self.events, since, None):
            size += len(msgspec.msgpack.encode(event))
            if size > limit and end > since:
                break
            end += 1
        return tuple(self.events[since:end])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[Event]:
    """The events in a file; a last line that a crash cut short is left out."""
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return [msgspec.json.decode(line, type=Event) for line in lines]


def _complete_lines(path: Path) -> int:
    """Number of whole lines in a file; a torn last line is cut off."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)
    return data.count(b"\n", 0, end)
