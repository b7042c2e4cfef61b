"""The agent's part in memberships: tells the node's workers who trains, and ends workers that were stopped.

Workers listen on a Unix socket in the abstract namespace, which is open to their own user only. A worker that
SIGSTOP has stopped keeps the others waiting without an end: after a time learned from the duration of its steps, it
is killed, and the world goes on without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from dlrover._util import framing, procs
from dlrover.rpc.localserver import LocalServer
from dlrover.spec.requests.membership import Members

STOPPED_STEPS = 3.0
"""Steps that a stopped worker may miss before it is killed."""
FADING = 0.9
"""Factor by which an earlier, longer step counts less with each further one."""
STOPPED_LIMITS = 0.5, 60.0
"""Least and most seconds of that time; the most counts where no step's duration is known."""


class MembersSocket(LocalServer):
    """A server that sends each worker that connects who trains."""

    def __init__(self) -> None:
        super().__init__("members", self._send)
        self._last: bytes = b""

    def publish(self, members: Members) -> None:
        """Send this to all connected workers, and to those that connect later."""
        self._last = framing.pack(msgspec.msgpack.encode(members))
        for writer in self.open:
            writer.write(self._last)

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._last)
        while await reader.read(4096):  # until the worker's connection ends; it has nothing to say
            pass


@dataclass
class _Pace:
    """What has been seen of a process."""

    steps: int = 0
    stepped_at: float = 0.0
    step: float = 0.0
    """Longest of its recent steps, in seconds; 0: none was seen."""
    stopped_at: float | None = None


class StoppedWatch:
    """Finds workers that have been stopped for longer than their steps explain. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._paces: dict[int, _Pace] = {}

    def overdue(self, pid: int, steps: int, *, stopped: bool, now: float) -> bool:
        """Note a worker's steps at ``now``; return whether it has been stopped for too long."""
        pace = self._paces.setdefault(pid, _Pace(steps, now))
        if steps > pace.steps:
            each = (now - pace.stepped_at) / (steps - pace.steps)
            pace.step = max(each, FADING * pace.step)
            pace.steps, pace.stepped_at = steps, now
        if not stopped:
            pace.stopped_at = None
            return False
        if pace.stopped_at is None:
            pace.stopped_at = now
        least, most = STOPPED_LIMITS
        limit = min(most, max(least, STOPPED_STEPS * pace.step)) if pace.step else most
        return now - pace.stopped_at > limit

    def forget(self, alive: Iterable[int]) -> None:
        """Forget all other processes."""
        self._paces = {pid: self._paces[pid] for pid in alive if pid in self._paces}


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; one that a debugger holds does not count."""
    return procs.stat(pid)[:1] == ["T"]
