"""A job under ``dlrover-run``, started so that it can never outlive who watches it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlrover.testing.chaos.guard import MARK, Guard

END_WAIT = 90.0
"""Seconds that a job which was told to end gets, before it is killed."""


class Launch:
    """One ``dlrover-run``, with a guard that kills what is left of it."""

    def __init__(
        self, arguments: Sequence[str], job_dir: Path, env: Mapping[str, str], output: Path
    ) -> None:
        mark = uuid.uuid4().hex
        self.environ = {**env, MARK: mark}
        """The environment of the job, and of whatever else the guard is to end."""
        self._guard = Guard(mark, env)
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "dlrover.cli.run", "--job-dir", str(job_dir), *arguments]
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """What the launcher has left with; None while it runs."""
        return self._process.poll()

    def interrupt(self) -> None:
        """Have the launcher end its job in an orderly way."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    async def end(self) -> int:
        """Wait for the end of a job that was told to end; its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, END_WAIT)
        return self.kill()

    def kill(self) -> int:
        """End the launcher at once, if it still runs; its exit code."""
        self._process.kill()
        return self._process.wait()

    def clean_up(self) -> list[str]:
        """Kill whatever the job has left behind; a line for each such process."""
        return self._guard.dismiss()
