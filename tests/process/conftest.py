"""Runs `dlrover-run` as a user does, finds its processes, and sees to it that none stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest

from dlrover.agent.workers.zygotes import ZYGOTE
from dlrover.spec.events import Event
from tests.services import free_port
from tests.support.forks import Forks
from tests.waiting import POLL, until

Value = TypeVar("Value")

DLROVER_RUN = (sys.executable, "-m", "dlrover.cli.run.run")
DLROVER = (sys.executable, "-m", "dlrover.cli.main")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
ON_TERMINAL = (
    sys.executable,
    "-c",
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])",
)
"""Starts the command that follows, with standard input as the terminal that controls it."""

ORPHAN_TIME = 15.0
"""Seconds that the processes of a launcher that died by SIGKILL have to follow it."""
MARK = "PROCESS_TEST_RUN"
"""The variable by which every process of a launch is known, whoever its parent is by now."""


def listener() -> socket.socket:
    """A socket that listens on a free port."""
    return socket.create_server(("", 0))


def stacks(pid: int) -> str:
    """Where the threads of a Python process are."""
    command = ["py-spy", "dump", "--pid", str(pid)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return shown.stdout or shown.stderr


def kind_of(process: psutil.Process) -> str:
    """``launcher``, ``master``, ``agent``, ``zygote``, ``worker`` or ``other``; empty if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        command = process.cmdline()
        for name in ("master", "agent"):
            if f"dlrover.{name}" in command:
                return name
        if "dlrover.cli.run.run" in command:
            return "launcher"
        parent = process.parent()
        above = parent.cmdline() if parent is not None else []
        if any(ZYGOTE in word for word in above):
            return "worker"
        if any(ZYGOTE in word for word in command):
            return "zygote" if "dlrover.agent" in above else "other"
        return "other"
    return ""


class Terminal:
    """A terminal whose screen is a file."""

    def __init__(self, screen: Path) -> None:
        self._master, self.slave = pty.openpty()
        self._thread = threading.Thread(target=self._copy, args=(screen,), daemon=True)
        self._thread.start()

    def _copy(self, screen: Path) -> None:
        with screen.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while data := os.read(self._master, 1 << 16):
                file.write(data)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def close(self) -> None:
        os.close(self.slave)  # the last one: reading ends
        self._thread.join(5)
        os.close(self._master)


class Launch:
    """One command, started; its output goes to files."""

    def __init__(
        self,
        command: Sequence[str],
        is_ours: bool,
        directory: Path,
        env: Mapping[str, str],
        cwd: Path | None,
        terminal: bool,
    ) -> None:
        self.is_ours = is_ours
        self.mark = uuid.uuid4().hex
        self.job_dir = directory / "job"
        directory.mkdir(parents=True, exist_ok=True)
        self._out, self._err = (directory / f"{n}-{self.mark[:6]}" for n in ("out", "err"))
        self._terminal = Terminal(self._err) if terminal else None
        with self._out.open("wb") as out, self._err.open("ab") as err:
            self.process = psutil.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=self._terminal.slave if self._terminal else subprocess.DEVNULL,
                stdout=out,
                stderr=self._terminal.slave if self._terminal else err,
                env={**env, MARK: self.mark},
                cwd=cwd or directory,
                start_new_session=True,
            )
        self.left_behind: list[str] = []

    # ---- its output

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def events(self) -> list[Event]:
        """The job's events so far; a line that is being written is left for the next time."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.job_dir / "events.jsonl").read_bytes().split(b"\n")[:-1]
            return [msgspec.json.decode(line, type=Event) for line in lines]
        return []

    def events_of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event.body, kind)]

    def until(self, condition: Callable[[], Value], timeout: float = 30.0, what: str = "") -> Value:
        """As `tests.waiting.until`; the failure shows what the job said and where its processes are."""
        return until(condition, timeout, what, self._report)

    def press(self, keys: bytes) -> None:
        """Type on the launch's terminal."""
        assert self._terminal is not None
        self._terminal.press(keys)

    # ---- its end

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for the end, and look at once for what is still there."""
        code = self.process.wait(timeout)
        if code != -signal.SIGKILL and self.is_ours:
            self.left_behind = self._alive()
        return code

    def succeed(self, timeout: float = 60.0) -> str:
        """Wait for exit code 0; what was printed."""
        return self.end_with(0, timeout)[0]

    def end_with(self, code: int, timeout: float = 60.0) -> tuple[str, str]:
        """Wait for an exit code; standard output and standard error."""
        try:
            ended = self.wait(timeout)
        except psutil.TimeoutExpired:
            pytest.fail(f"still runs after {timeout:g} s{self._report()}")
        assert ended == code, self._report()
        return self.stdout, self.stderr

    def _report(self) -> str:
        parts = [f"\n--- stdout\n{self.stdout}", f"--- stderr\n{self.stderr}", "--- events"]
        parts += [f"{event.time:.2f} {event.sentence()}" for event in self.events]
        for log in sorted(self.job_dir.glob("*.log")):
            parts.append(f"--- {log.name}\n{log.read_text()[-3000:]}")
        for process in self.processes():
            parts.append(f"--- {kind_of(process)} {process.pid}\n{stacks(process.pid)}")
        return "\n".join(parts)

    # ---- its processes

    def processes(self) -> list[psutil.Process]:
        """All processes that were started by this launch, the launcher included."""
        mark, found = f"{MARK}={self.mark}".encode(), []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(psutil.Error, OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes():  # empty once it has ended
                    found.append(psutil.Process(int(pid)))
        return found

    def of_kind(self, kind: str) -> list[psutil.Process]:
        return [process for process in self.processes() if kind_of(process) == kind]

    def pids(self, kind: str) -> set[int]:
        return {process.pid for process in self.of_kind(kind)}

    def wait_for(self, kind: str, count: int = 1, timeout: float = 20.0) -> list[psutil.Process]:
        """The processes of a kind, once there are ``count`` of them."""

        def found() -> list[psutil.Process]:
            processes = self.of_kind(kind)
            return processes if len(processes) == count else []

        return self.until(found, timeout, f"{count} of kind {kind}")

    def _alive(self) -> list[str]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())[:120]
                found.append(f"{kind_of(process)} {process.pid}: {command}")
        return found

    def close(self) -> None:
        """Kill what is left. Fails if the launch left something behind by itself."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        end = time.monotonic() + ORPHAN_TIME
        while (stayed := self._alive()) and time.monotonic() < end:
            time.sleep(POLL)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._terminal is not None:
            self._terminal.close()
        assert not self.left_behind, f"left behind at the end: {self.left_behind}"
        assert not (stayed and self.is_ours), (
            f"left behind {ORPHAN_TIME:g} s after the launcher's death: {stayed}"
        )


class Runner:
    """Starts launches in a test's own directory. Use `Runner.close` when the test is over."""

    scripts = Path(__file__).parent / "scripts"
    until = staticmethod(until)
    free_port = staticmethod(free_port)
    listener = staticmethod(listener)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DLROVER_", "PET_", "TORCHELASTIC_", "OMP_NUM", "TORCH_NCCL"))
        }
        self.env["DLROVER_STATE_DIR"] = str(directory / "state")
        self.env["DLROVER_CACHE_DIR"] = os.environ["DLROVER_CACHE_DIR"]
        self._launches: list[Launch] = []

    def __call__(
        self,
        *args: str | Path,
        launcher: Sequence[str] = DLROVER_RUN,
        inside: Sequence[str] = (),
        name: str = "run",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        terminal: bool = False,
    ) -> Launch:
        """Start ``dlrover-run args``, in the job directory ``<name>/job``.

        ``inside`` is a command that starts the one that follows it. With ``terminal`` standard input
        and standard error are a terminal.
        """
        directory = self.directory / name
        own = ["--job-dir", directory / "job"] if launcher == DLROVER_RUN else []
        inside = (*inside, *(ON_TERMINAL if terminal else ()))
        command = [str(word) for word in (*inside, *launcher, *own, *args)]
        is_ours = launcher == DLROVER_RUN
        launch = Launch(command, is_ours, directory, {**self.env, **(env or {})}, cwd, terminal)
        self._launches.append(launch)
        return launch

    def torchrun(self, *args: str | Path, **settings: Any) -> Launch:
        """Start ``torchrun args``."""
        return self(*args, launcher=TORCHRUN, **{"name": "torchrun", **settings})

    def dlrover(self, *args: str | Path, timeout: float = 20.0) -> subprocess.CompletedProcess:
        """Run a verb of ``dlrover`` to its end."""
        return subprocess.run(
            [*DLROVER, *map(str, args)],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def status(self, launch: Launch) -> dict[str, Any]:
        """What ``dlrover status --output json`` says."""
        shown = self.dlrover("status", "--job-dir", launch.job_dir, "--output", "json")
        assert shown.returncode == 0, shown.stderr
        return json.loads(shown.stdout)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for launch in self._launches:
                closing.callback(launch.close)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    try:
        yield runner
    finally:
        runner.close()


@pytest.fixture(scope="module")
def module_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """A runner for what the tests of a module have in common."""
    runner = Runner(tmp_path_factory.mktemp("module"))
    try:
        yield runner
    finally:
        runner.close()


TRAIN = Runner.scripts / "train.py"


def records(path: Path) -> list[dict[str, Any]]:
    """What a program has written so far, a line for each record; a line that is being written is left out."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return []


def losses_of(out: Path) -> list[tuple[int, float, int]]:
    """Step, loss and world size of each step that `scripts/train.py` has done."""
    return [(r["step"], r["loss"], r["world_size"]) for r in records(out / "losses.jsonl")]


class Training:
    """A training job of `scripts/train.py`, and what it has written."""

    def __init__(self, run: Runner, steps: int, step_time: float, *options: str, **settings: Any):
        self.out = run.directory / settings.get("name", "run") / "out"
        self.out.mkdir(parents=True, exist_ok=True)
        self.launch = run(*options, TRAIN, self.out, steps, step_time, **settings)

    @property
    def losses(self) -> list[tuple[int, float, int]]:
        """Step, loss and world size of each step done so far."""
        return losses_of(self.out)

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Each start of a worker: its rank, pid, step and time."""
        return records(self.out / "starts.jsonl")

    def wait_for_step(self, step: int, timeout: float = 30.0) -> None:
        until(lambda: len(self.losses) >= step, timeout, f"step {step}")


@pytest.fixture
def train(run: Runner) -> Callable[..., Training]:
    """Starts training: ``train(steps, step_time, *options of dlrover-run, name=...)``."""

    def start(steps: int, step_time: float, *options: str, **settings: Any) -> Training:
        return Training(run, steps, step_time, *options, **settings)

    return start


@pytest.fixture(scope="session")
def undisturbed(
    forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[int, float, int]]:
    """Losses of 30 steps of two workers that nothing happens to, and that no launcher of ours has started."""
    out = tmp_path_factory.mktemp("undisturbed")
    forks.ranks(2, TRAIN, out, "30", "0", env=os.environ)
    return losses_of(out)
