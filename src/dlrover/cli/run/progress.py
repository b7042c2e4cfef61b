"""Progress of a job under ``dlrover-run``: a status line on a terminal, and a line for each fault."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

import msgspec
from rich.console import Console
from rich.text import Text

from dlrover.cli.run.report import duration
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.master.journal import history
from dlrover.rpc import messages
from dlrover.rpc.client import connect
from dlrover.spec import events
from dlrover.spec.jobdir import JobDir
from dlrover.spec.words import counted

RETRY_DELAY = 0.5
"""Seconds between attempts to reach the master."""
WAIT_NOTICE = 10.0
"""Seconds from the beginning of a wait to a line about it, and between two lines, where there is no status line."""

NOTABLE = (
    events.NodeLost,
    events.JobScaled,
    events.WorkerFailed,
    events.HangFound,
    events.SlowRank,
    events.SlowRankRecovered,
    events.SamplesSkipped,
    events.RestartDecided,
    events.Recovered,
    events.StepsUndone,
    events.MasterRecovered,
)
"""Events that are shown without asking."""

PHASE_STYLES = {"running": "bold green", "restarting": "bold yellow"}
"""Colours of phases on the status line; bold for any other."""
ERASE_LINE = b"\r\x1b[2K"


def status_line(status: messages.Status) -> Text:
    """Return the job's state on one line."""
    nodes = sum(node.status == "running" for node in status.nodes)
    made = counted(status.total_steps, "step")
    parts = [
        Text(status.phase, style=PHASE_STYLES.get(status.phase, "bold")),
        *([Text(f"{counted(nodes, 'node')}, {status.processes()}")] if nodes else []),
        Text(f"step {status.step}" if status.step >= 0 else made),
        *([Text(f"{status.rate:.3g} steps/s", style="green")] if status.rate else []),
        *([Text(f"{duration(status.seconds_left)} left")] if status.seconds_left >= 0 else []),
        Text(counted(status.restarts, "restart"), style="yellow" if status.restarts else ""),
    ]
    if status.waiting_for:
        parts.append(Text(status.waiting_for, style="cyan"))
    return Text(" · ").join(parts)


class Screen:
    """Terminal on which the job's output scrolls by above a status line.

    Without a terminal there is no status line, and output does not pass through here at all. ``width`` returns the
    terminal's columns, which change as people pull at its window.
    """

    def __init__(self, out: BinaryIO, *, width: Callable[[], int]) -> None:
        self._out = out
        self._width = width
        self._lock = threading.Lock()
        self._shown = b""
        self._line = b""
        self._at_line_start = True

    def write(self, data: bytes) -> None:
        """Show output of the job, bytes unchanged."""
        with self._lock:
            self._hide()
            self._out.write(data)
            self._at_line_start = data.endswith(b"\n")
            self._draw()

    def say(self, text: str) -> None:
        """Show a message on a line of its own: output may have left its last line unfinished."""
        with self._lock:
            self._hide()
            begun = b"" if self._at_line_start else b"\n"
            self._out.write(begun + text.encode() + b"\n")
            self._at_line_start = True
            self._draw()

    def set_status(self, line: Text) -> None:
        """Replace the status line."""
        with self._lock:
            self._line = _render(line, self._width())
            if self._line != self._shown:
                self._hide()
                self._draw()

    def close(self) -> None:
        """Remove the status line."""
        with self._lock:
            self._line = b""
            self._hide()
            self._out.flush()

    def _hide(self) -> None:
        if self._shown:
            self._out.write(ERASE_LINE)
            self._shown = b""

    def _draw(self) -> None:
        # An unfinished line, such as the job's own progress bar, is left alone until it ends.
        if self._at_line_start and self._line:
            self._out.write(self._line)
            self._shown = self._line
        self._out.flush()


def columns(fd: int) -> int:
    """Return the columns of a terminal; 80 if it does not tell."""
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:
        return 80


def _render(line: Text, width: int) -> bytes:
    line.truncate(max(1, width - 1), overflow="ellipsis")
    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=True, width=width, highlight=False)
    console.print(line, end="", soft_wrap=True)
    return buffer.getvalue().encode()


class Viewer:
    """View of a job's events and state that shows each event once."""

    def __init__(self, screen: Screen | None) -> None:
        self._screen = screen
        self._waited_at = 0.0
        """When the job last did not wait, or the last line about a wait was shown, in seconds since its start."""
        self._seen = 0
        """Number of the last event shown."""
        self.status: messages.Status | None = None
        """What the master said last."""

    async def follow(self, job_dir: JobDir) -> None:
        """Show a job's progress until cancelled; while the master is away, wait for it."""
        while True:
            with contextlib.suppress(InfrastructureError, ConfigurationError):
                async with connect(job_dir) as client:
                    async for notice in client.watch(self._seen, follow=True):
                        self._show(notice)
            await asyncio.sleep(RETRY_DELAY)

    def catch_up(self, job_dir: JobDir) -> None:
        """Show what happened in an ended job since its master was last heard."""
        try:
            happened = history.read(job_dir.events)
        except (OSError, msgspec.DecodeError):
            return  # there are none, or they are damaged: the last screen says how the job ended
        for event in happened:
            self._show_event(event)

    def _show(self, notice: messages.Notice) -> None:
        for event in notice.events:
            self._show_event(event)
        self.status = status = notice.status
        if self._screen is not None:
            self._screen.set_status(status_line(status))
        elif not status.waiting_for:
            self._waited_at = status.seconds
        elif status.seconds - self._waited_at > WAIT_NOTICE:
            self._waited_at = status.seconds
            say(status.waiting_for)

    def _show_event(self, event: events.Event) -> None:
        if event.seq > self._seen:
            self._seen = event.seq
            if isinstance(event.body, NOTABLE):
                say(event.sentence(), self._screen)


def say(text: str, screen: Screen | None = None) -> None:
    """Print a message for the user, above the status line if there is one."""
    if screen is not None:
        screen.say(f"dlrover: {text}")
    else:
        print(f"dlrover: {text}", file=sys.stderr, flush=True)
