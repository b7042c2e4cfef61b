"""Runs jobs with TensorFlow's roles, kills their processes, and reads what the programs note."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.process.conftest import Runner, run

__all__ = ["job", "run"]
SCRIPTS = Path(__file__).parent / "scripts"
START = 120.0
"""Seconds for TensorFlow's imports on a busy machine."""


class Job:
    """A job of a program of `scripts`, whose first argument is the folder of its notes."""

    def __init__(self, run: Runner, script: str, *args: object, **options: int) -> None:
        self.out = run.directory / "out"
        self.out.mkdir()
        given = {"local_nodes": 1, "servers": 2, "shutdown_timeout": 5, **options}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        self.launch = run("--chief", *flags, SCRIPTS / script, self.out, *map(str, args))
        self._run = run

    def notes(self, kind: str) -> list[Any]:
        """The time and the content of each note of a kind."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.out / "notes").read_text().split("\n")[:-1]
            return [note for note in map(json.loads, lines) if note[1] == kind]
        return []

    @property
    def steps(self) -> int:
        """Steps so far, repeated ones included."""
        return len(self.notes("step"))

    @property
    def cluster(self) -> dict[str, list[str]]:
        """Addresses of the present cluster."""
        return self.notes("begin")[-1][3]

    def train(self, steps: int, timeout: float = START) -> None:
        """Wait for further steps of the present cluster."""
        reached = self.steps + steps
        self.launch.until(lambda: self.steps >= reached, timeout, f"{steps} more steps")

    def begun(self, condition: Callable[[dict[str, list[str]]], bool], what: str) -> None:
        """Wait for a cluster that fulfils a condition, and for a step of it."""
        self.launch.until(lambda: self.notes("begin") and condition(self.cluster), START, what)
        self.train(1)

    def process(self, address: str) -> psutil.Process:
        """The process that listens at an address."""
        port = int(address.rpartition(":")[2])
        for process in self.launch.of_kind("worker"):
            with contextlib.suppress(psutil.Error):
                if any(
                    c.laddr.port == port and c.status == psutil.CONN_LISTEN
                    for c in process.net_connections()
                ):
                    return process
        raise LookupError(address)

    def kill(self, role: str, index: int = -1, number: int = signal.SIGKILL) -> None:
        """Send a signal to a task of the present cluster."""
        self.process(self.cluster[role][index]).send_signal(number)

    def scale(self, role: str, nodes: int) -> None:
        """Ask for another number of nodes."""
        shown = self._run.dlrover(
            "scale", "--job-dir", self.launch.job_dir, "--role", role, "--nodes", nodes
        )
        assert shown.returncode == 0, shown.stderr

    def end(self, timeout: float = 180.0) -> dict[str, Any]:
        """Let the program hurry to its end; what it noted then."""
        (self.out / "hurry").touch()
        self.launch.succeed(timeout)
        return json.loads((self.out / "end").read_text())


@pytest.fixture
def job(run: Runner) -> Callable[..., Job]:
    """Starts a job."""
    return lambda *args, **options: Job(run, *args, **options)
