"""Guard that ends the processes of a chaos run when the run itself has ended in any way.

``python -m dlrover.testing.chaos.guard --fd N --mark TEXT`` waits until the pipe ``N`` closes. Then it kills
every process whose environment holds the mark, stopped ones too, and prints a line for each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

import psutil

from dlrover._util import procs

MARK = "DLROVER_CHAOS_MARK"
"""Variable that identifies the processes of a run, whatever their parent is by now."""
POLL = 0.05
"""Seconds between two checks."""
PATIENCE = 30.0
"""Seconds that killed processes have to vanish."""


class Guard:
    """Process that watches over a run and briefly outlives it."""

    def __init__(self, mark: str, env: Mapping[str, str]) -> None:
        fd, self._held = os.pipe2(os.O_CLOEXEC)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, "--fd", str(fd), "--mark", mark],
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
