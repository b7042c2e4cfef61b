"""A job under ``dlrover-run`` that cannot outlive the process that watches it."""

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
"""Seconds that a job has to end before it is killed."""


class Launch:
    """One ``dlrover-run``, with a guard that kills its leftovers."""

    def __init__(
        self, arguments: Sequence[str], job_dir: Path, env: Mapping[str, str], output: Path
    ) -> None:
        mark = uuid.uuid4().hex
        self.environ = {**env, MARK: mark}
        """Environment of the job, and of everything else that the guard must end."""
        self._guard = Guard(mark, env)
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "dlrover.cli.run.run",
            "--job-dir",
            str(job_dir),
            *arguments,
        ]
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
        """Return the launcher's exit code; None while it runs."""
        return self._process.poll()

    def interrupt(self) -> None:
        """Ask the launcher to end its job in an orderly way."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    async def end(self) -> int:
        """Wait up to `END_WAIT` for the job's end, then kill it; return the exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, END_WAIT)
        return self.kill()

    def kill(self) -> int:
        """Kill the launcher if it still runs; return its exit code."""
        self._process.kill()
        return self._process.wait()

    def clean_up(self) -> list[str]:
        """Kill everything that the job left behind; return a line for each such process."""
        return self._guard.dismiss()
