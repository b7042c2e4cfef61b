"""A job under ``dlrover-run`` and its guard, which ends its processes however the chaos run itself ends.

``python -m dlrover.testing.chaos.guard --fd N --mark TEXT`` waits until the pipe ``N`` closes. Then it kills
every process whose environment holds the mark, stopped ones too, and prints a line for each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from dlrover._util import procs, start

MARK = "DLROVER_CHAOS_MARK"
"""Variable that identifies the processes of a run, whatever their parent is by now."""
POLL = 0.05
"""Seconds between two checks."""
PATIENCE = 30.0
"""Seconds that killed processes have to vanish."""
END_WAIT = 90.0
"""Seconds that a job has to end before it is killed."""


class Guard:
    """Process that watches over a run and briefly outlives it."""

    def __init__(self, mark: str, env: Mapping[str, str]) -> None:
        fd, self._held = os.pipe2(os.O_CLOEXEC)
        self._process = subprocess.Popen(
            [*start.command(__name__), "--fd", str(fd), "--mark", mark],
            env=dict(env),
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        os.close(fd)

    def dismiss(self) -> list[str]:
        """End the watch; return a line for each process that the run left behind and the guard killed."""
        os.close(self._held)
        said, _ = self._process.communicate(timeout=2 * PATIENCE)
        return said.splitlines()


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
            *start.command("dlrover.cli.run.run"),
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


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes of a run."""
    return [process for process in psutil.process_iter() if _mark(process) == mark]


def _mark(process: psutil.Process) -> str | None:
    try:
        ended = process.status() == psutil.STATUS_ZOMBIE
        return None if ended else process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Watch, and clean up; return 0 if there was nothing to clean up, else 1."""
    parser = argparse.ArgumentParser(prog="python -m dlrover.testing.chaos.guard")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--mark", required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.read(args.fd, 1)
    left = [_line(process) for process in marked(args.mark)]
    pause = threading.Event()
    for _ in range(int(PATIENCE / POLL)):
        alive = marked(args.mark)
        if not alive:
            break
        procs.kill([process.pid for process in alive])
        pause.wait(POLL)
    with contextlib.suppress(BrokenPipeError):  # a killed run does not read
        os.write(1, "".join(f"{line}\n" for line in left).encode())
    return min(len(left), 1)


def _line(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return str(process.pid)


if __name__ == "__main__":
    sys.exit(main())
