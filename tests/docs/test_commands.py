"""Every command in a ``console`` block of the pages runs, ends as documented and prints what is shown.

The commands of a page run in order, in one directory that is the page's own. These are the rules:

- ``$ echo $?`` and the number below it state the status of the command before; without it the status is 0.
- ``kill -9`` strikes while the ``dlrover-run`` before it runs, and strikes one of that job's own processes.
- Shown lines have to be in the output, in any order. Numbers (with the plurals after them), the names of the machine,
  of the directory and of a run may differ; ``...`` stands for more lines. Of ``ls`` all is shown.
- A Python block that the text tells to save is a file of that directory; so is a ``train.py`` that no page shows.
- What a page does on several machines is done by several processes of this one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from dlrover.cli.run import arguments
from tests.services import free_port

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]

NOT_RUN = {
    r"scripts/(quickstart|test)": "they install; CI runs them",
    r"dlrover dashboard": "it serves until it is stopped; tests/dashboard starts it",
    r"dlrover ckpt save my-job": "it needs a running job; tests/process/test_local_memory.py gives it one",
    r"pip install .*": "it installs; CI does the same in an environment of its own",
}
"""Commands that are not run, and why."""

SHORTER = {
    "STEPS = 10_000": "STEPS = 1_000",
    "step % 500": "step % 100",
    "--step-time 0.1": "--step-time 0.05",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--epochs 3": "--epochs 2",
    "--epochs 6": "--epochs 3",
    "examples/01_digits_ddp/train.py": "examples/01_digits_ddp/train.py --epochs 5 --target-accuracy 0",
    "examples/02_char_gpt/train.py": "examples/02_char_gpt/train.py --layers 1 --width 32 --heads 2 "
    "--context 32 --corpus-mb 1 --global-batch-size 12 --steps 60 --eval-every 20 --sample 20",
    "examples/05_parameter_server/train.py": "examples/05_parameter_server/train.py --clicks 10000",
    "examples/08_growing_embeddings/train.py": "examples/08_growing_embeddings/train.py --data clicks "
    "--clicks 5000",
}
"""What is replaced in commands and programs so that they take seconds."""

STATUSES = {r"dlrover (doctor|check)": {0, 3}}
"""Statuses of commands that judge the machine they run on."""

PROGRAM = """
import os, time
print(f"rank {os.environ['RANK']} is process {os.getpid()}", flush=True)
print("step 1: done", flush=True)
time.sleep(60 if os.environ["WORLD_SIZE"] == "3" else 2)
"""
"""The ``train.py`` of pages that do not show theirs. A world of three lacks a node, and waits for it."""

TORCH = {
    "getting-started.md", "goodput.md", "hangs.md", "chaos.md", "checkpoint-tools.md", "elastic-batch.md",
    "data.md", "parameter-servers.md", "optim.md",
    "01_digits_ddp", "02_char_gpt", "08_growing_embeddings", "12_iris",
}  # fmt: skip
"""Pages whose programs need PyTorch, by the last part of their names that tells them apart."""

TOOLS = {
    "python": "",
    "dlrover": "-m dlrover.cli.main",
    "dlrover-run": "-m dlrover.cli.run.run",
}
"""What a reader has installed, and how this interpreter is told to be it."""

END = 120.0
"""Seconds that a command may take."""


@dataclass
class Command:
    """A command of a page, with what the page says of it."""

    text: str
    shown: list[str] = field(default_factory=list)
    statuses: set[int] = field(default_factory=lambda: {0})

    @property
    def complete(self) -> bool:
        """Whether no further line belongs to it: its document, if it has one, has ended."""
        document = re.search(r"<<'(\w+)'", self.text)
        return document is None or self.text.endswith(f"\n{document[1]}")


def commands_of(page: str) -> list[Command]:
    """The commands in the console blocks of a page."""
    found: list[Command] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if found and not found[-1].complete:
                found[-1].text += f"\n{line}"
            elif line.startswith("$ "):
                found.append(Command(re.sub(r"\s{2,}#.*", "", line[2:])))
            else:
                found[-1].shown.append(line)
    for command, status in itertools.pairwise(found):
        if status.text == "echo $?":
            command.statuses = {int(status.shown[0])}
        for expression, statuses in STATUSES.items():
            if re.fullmatch(expression, command.text):
                command.statuses = statuses
    return [command for command in found if command.text != "echo $?"]


def files_of(page: str) -> dict[str, str]:
    """The programs that the text of a page tells to save."""
    saved = r"Save this as `([\w.]+)`[^`]*```python\n(.*?)```"
    return {"train.py": PROGRAM, **dict(re.findall(saved, page, re.DOTALL))}


def shortened(text: str) -> str:
    """A command or program that takes seconds."""
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


def not_run(command: Command) -> bool:
    return any(re.fullmatch(expression, command.text) for expression in NOT_RUN)


def comparable(text: str, directory: Path) -> set[str]:
    """The lines of ``text`` without what differs from run to run."""
    text = text.replace(str(directory), "/home/me")
    text = re.sub(rf"(?<![\w/]){re.escape(socket.gethostname())}(?![\w/])", "laptop", text)
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}_\w{8}", "RUN", text)
    text = re.sub(r"\d+(\.\d+)?", "N", text)
    text = re.sub(r"\bN (\w+)s\b", r"N \1", text)  # 1 round, 2 rounds
    text = re.sub(
        r"(?<=the largest loss is )[a-z -]+(?=:)", "CAUSE", text
    )  # two may be about equal
    lines = {" ".join(line.split()) for line in text.splitlines()}
    return {line for line in lines if line not in ("", "...")}


class Running:
    """A command that was started."""

    def __init__(self, text: str, directory: Path, env: dict[str, str]) -> None:
        self.text = text
        self._log = directory / f".output-{len(list(directory.glob('.output-*')))}"
        with self._log.open("wb") as log:
            self.process = psutil.Popen(
                ["bash", "-c", text],
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until ``condition()`` holds while the command runs."""
        end = time.monotonic() + END
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"{self.text}: {what} did not come\n{self.output}")
            time.sleep(0.02)

    def kill(self, victim: str) -> None:
        """Kill one of the job's processes: the one whose number it printed for rank 1, or an agent."""
        self.until(lambda: re.search(r"^step \d+: ", self.output, re.MULTILINE), "the first step")
        if "agent" not in victim:
            told = re.search(r"^rank 1\b.* process (\d+)", self.output, re.MULTILINE)
            assert told is not None, self.output
            os.kill(int(told[1]), signal.SIGKILL)
            return
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "dlrover.agent" in process.cmdline():
                    process.kill()
                    return
        pytest.fail(f"{self.text}: no agent runs")

    def end(self, command: Command, directory: Path) -> None:
        """Wait for the end, which has to be the documented one."""
        status = self.process.wait(END)
        assert status in command.statuses, f"$ {self.text}\n{self.output}"
        shown, printed = (
            comparable(text, directory) for text in ("\n".join(command.shown), self.output)
        )
        missing = shown ^ printed if self.text.startswith("ls ") else shown - printed
        assert not missing, f"$ {self.text}\n{self.output}\nnot as shown: {missing}"

    def close(self) -> None:
        """Kill it if it still runs; what it started goes with it."""
        if self.process.poll() is None:
            for process in [*self.process.children(recursive=True), self.process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait(END)


class Session:
    """A shell of a reader who follows one page, and has installed what it tells and no more."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        tools = directory / ".bin"
        tools.mkdir(parents=True)
        for name, start in TOOLS.items():
            (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {start} "$@"\n')
            (tools / name).chmod(0o755)
        (directory / "examples").symlink_to(ROOT / "examples")
        ours = ("DLROVER_", "PET_", "TORCHELASTIC_", "OMP_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        elsewhere = [
            part for part in os.environ["PATH"].split(":") if not (Path(part) / "py-spy").exists()
        ]
        self.env["PATH"] = ":".join([str(tools), *elsewhere])
        self.env["DLROVER_STATE_DIR"] = str(directory / ".state")
        self.env["DLROVER_CACHE_DIR"] = os.environ["DLROVER_CACHE_DIR"]
        self.env["COLUMNS"] = "200"
        self._port, self.brain_port = free_port(), free_port()
        self.served_ports = {"8500": str(free_port()), "8501": str(free_port())}
        self.env["DLROVER_BRAIN"] = f"127.0.0.1:{self.brain_port}"
        self._running: list[Running] = []

    def start(self, command: Command) -> Running:
        """Start a command; the hosts and the port of a page are those of this machine."""
        text = command.text.replace("host0", "localhost").replace("29400", str(self._port))
        if text.startswith("dlrover master"):
            text += f" --port {self._port}"
        if text.startswith("dlrover brain serve"):
            text += f" --port {self.brain_port}"
        if text.startswith("dlrover embedding serve"):
            http, raw = self.served_ports.values()
            text += f" --port {http} --raw-port {raw}"
        self._running.append(Running(shortened(text), self.directory, self.env))
        return self._running[-1]

    def run(self, command: Command, strike: Command | None) -> None:
        """Run a command to its end, struck by a kill if one follows."""
        if command.text.startswith("export "):
            name, _, value = command.text.removeprefix("export ").partition("=")
            self.env[name] = value
            return
        machines = 2 if "host0" in command.text else 1
        started = [self.start(command) for _ in range(machines)]
        if strike is not None:
            started[0].kill(strike.text)
        for one in started:
            one.end(command, self.directory)

    def close(self) -> None:
        """Leave nothing behind."""
        for running in self._running:
            running.close()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    opened = Session(tmp_path / "me")
    try:
        yield opened
    finally:
        opened.close()


def follow(session: Session, page: Path) -> None:
    """Do all that a page says."""
    text = page.read_text()
    for name, program in files_of(text).items():
        own = program.replace("29500", str(session.brain_port))
        for port, free in session.served_ports.items():
            own = own.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
        (session.directory / name).write_text(shortened(own))
    commands = [command for command in commands_of(text) if not not_run(command)]
    served: list[tuple[Running, Command]] = []
    for command, next_one in zip(commands, [*commands[1:], None], strict=True):
        if command.text.startswith("dlrover master"):
            served.append((session.start(command), command))
        elif command.text.startswith("dlrover brain serve"):  # until the page is done
            running = session.start(command)
            running.until(lambda: "listens" in running.output, "its port")  # noqa: B023 - at once
        elif command.text.startswith("dlrover embedding serve"):
            running = session.start(command)
            running.until(lambda: "Serving" in running.output, "its ports")  # noqa: B023 - at once
        elif not command.text.startswith("kill "):
            strikes = next_one is not None and next_one.text.startswith("kill ")
            session.run(command, next_one if strikes else None)
    for running, command in served:
        running.end(command, session.directory)


def page_params() -> Iterator[object]:
    for page in PAGES:
        if not all(map(not_run, commands_of(page.read_text()))):
            name = str(page.relative_to(ROOT))
            torch = [pytest.mark.torch] if TORCH & set(page.parts) else []
            yield pytest.param(page, id=name, marks=torch)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", list(page_params()))
def test_commands_do_what_the_page_says(session: Session, page: Path) -> None:
    follow(session, page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_that_are_only_shown_are_valid(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^dlrover-run +(.+)$", block, re.MULTILINE):
            arguments.parse(shlex.split(line), {})
