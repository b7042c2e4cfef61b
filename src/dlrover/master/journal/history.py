"""The job's events: numbered, kept in memory for watchers and in ``events.jsonl`` for all others."""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dlrover._util import decoding
from dlrover.spec.events import Event, EventBody, JobSubmitted, WorkerFailed

logger = logging.getLogger(__name__)

RECENT_TEXT = 16 * 1024 * 1024
"""Maximum total length of failure texts in the latest events in memory, in characters."""
OLD_TEXT = 256
"""Characters that older events keep of each text in memory; the file has all of them."""


class History:
    """The events of a job, appended to a file as one JSON object per line.

    Replaying the journal produces the same events again; those that the file already has are not
    written twice.
    """

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = []
        self._path = path
        self._long: collections.deque[tuple[int, int]] = collections.deque()  # indices and sizes
        self._text = 0
        self.listeners: list[Callable[[Event], None]] = []
        """Callbacks for each event added from now on."""
        self._written = _complete_lines(path)
        self._file = path.open("ab", buffering=0)
        # It may grow for hours: a copy for each event would take too long.
        self._unwritten = bytearray()
        self._full = False

    def add(self, body: EventBody, time: float) -> Event:
        """Number an event, keep it and notify the listeners."""
        event = Event(len(self.events) + 1, time, body)
        self._keep(event)
        if event.seq > self._written:
            self._unwritten += msgspec.json.encode(event) + b"\n"
            self._write()
        for listener in self.listeners:
            listener(event)
        return event

    @property
    def recorded(self) -> int:
        """Number of events in the file."""
        return self._written

    def follow(self, earlier: int) -> None:
        """Number events after the ``earlier`` ones in the file; those that no journal brings again are kept, too."""
        if earlier > len(self.events):
            for event in itertools.islice(read(self._path), len(self.events), earlier):
                self._keep(event)

    def _keep(self, event: Event) -> None:
        """Keep an event in memory; shorten the texts of older ones if there is too much text."""
        self.events.append(event)
        if not isinstance(event.body, WorkerFailed):
            return
        failure = event.body.failure
        size = len(failure.message) + len(failure.traceback) + len(failure.stderr_tail)
        self._long.append((len(self.events) - 1, size))
        self._text += size
        while self._text > RECENT_TEXT:
            place, size = self._long.popleft()
            self._text -= size
            old = self.events[place]
            assert isinstance(old.body, WorkerFailed)
            body = WorkerFailed(old.body.failure.bounded(OLD_TEXT), old.body.verdict)
            self.events[place] = Event(old.seq, old.time, body)

    def _write(self) -> None:
        """Write pending events; keep what a full disk does not take for the next write."""
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            if not self._full:
                logger.warning("Events cannot be written for now: %s", error)
            self._full = True
        else:
            self._full = False

    def batch(self, since: int, limit: int) -> tuple[Event, ...]:
        """Return the events after number ``since`` that fit into ``limit`` bytes on the wire, or else one."""
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
    """Return the events in a file, without a last line that a crash cut short."""
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return [decoding.json(line, Event) for line in lines]


def known_before(known: Sequence[Event], first: Event) -> int:
    """Return how many events are known from before the ``first`` one of a master's history.

    A master that has lost its journal numbers its events from 1 again.
    """
    for event in known:
        if isinstance(event.body, JobSubmitted) and event.time == first.time:
            return event.seq - 1
    return len(known)


def _complete_lines(path: Path) -> int:
    """Return the number of whole lines in a file, after cutting off a torn last line."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)
    return data.count(b"\n", 0, end)
