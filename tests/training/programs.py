"""Programs run by ``python -u`` and by the workers of a zygote, and what both leave."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dlrover.agent.workers.zygote import StartOrder
from dlrover.agent.workers.zygotes import ZygoteProcess, make_board
from dlrover.training.worker.bootstrap import Program
from dlrover.training.worker.progress import Board, Slot


class Ended(NamedTuple):
    """What a program left: exit code (minus n for signal n) and output."""

    code: int
    stdout: str
    stderr: str

    def without_addresses(self) -> "Ended":
        stdout, stderr = (re.sub(r"\b0x[0-9a-f]+", "0x...", text) for text in self[1:])
        return Ended(self.code, stdout, stderr)


class Worker(NamedTuple):
    ended: Ended
    error: dict | None
    """Content of the error file."""
    slot: Slot
    """What is on the progress board."""
    modules: dict | None
    """What it had loaded at its first step."""


def plain(directory: Path, *args: str, **variables: str) -> Ended:
    """Run ``python -u args``."""
    ended = subprocess.run(
        [sys.executable, "-u", *args],
        cwd=directory,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr).without_addresses()


class Zygote:
    """A zygote that runs workers one after another."""

    def __init__(self, directory: Path, preload: dict | None = None, **variables: str) -> None:
        self.problem = ""
        self.patient = False
        """Whether workers are held back until it is ready."""
        self.unfit = 0
        """How many of them it could not start."""
        self._directory = directory
        self._env = {**os.environ, **variables}
        self._board_fd = make_board()
        self._preload = ""
        if preload:
            self._preload = str(directory / "preload.json")
            Path(self._preload).write_text(json.dumps({"own": {}, **preload}))

    def run(
        self,
        *programs: Sequence[str],
        strike: signal.Signals | None = None,
        strike_zygote: signal.Signals | None = None,
    ) -> list[Worker]:
        """Run programs, given as the arguments of python, one after another.

        ``strike`` hits each once it is ready, ``strike_zygote`` the zygote once it has its orders.
        """
        os_directory = os.getcwd()
        os.chdir(self._directory)
        try:
            return asyncio.run(self._run(programs, strike, strike_zygote))
        finally:
            os.chdir(os_directory)
            os.close(self._board_fd)

    async def _run(
        self, programs, strike: signal.Signals | None, strike_zygote: signal.Signals | None
    ) -> list[Worker]:
        exited: asyncio.Queue[int] = asyncio.Queue()

        def give_up(orders: list[StartOrder]) -> None:
            self.unfit += len(orders)
            exited.put_nowait(-1)

        pids: list[int] = []
        zygote = ZygoteProcess(
            sys.executable,
            self._env,
            self._board_fd,
            self._preload,
            lambda _, pid: pids.append(pid),
            lambda _, status, _problem: exited.put_nowait(status),
            lambda _: exited.put_nowait(-1),
            give_up if self.patient else None,
        )
        workers = []
        for number, program in enumerate(programs):
            order = self._order(number, program)
            zygote.spawn(order)
            if strike is not None:
                # Unbuffered, a line is written in parts.
                while not re.search(rb"^ready.*\n", Path(order.stdout).read_bytes(), re.MULTILINE):
                    await asyncio.sleep(0.01)
                os.kill(pids[-1], strike)
            if strike_zygote is not None:
                zygote.process.send_signal(strike_zygote)
            status = await asyncio.wait_for(exited.get(), 20)
            await asyncio.sleep(0)
            if self.unfit:
                continue
            workers.append(self._worker(order, status))
        self.problem = zygote.problem
        zygote.close()
        await zygote.wait()
        return workers

    def _order(self, number: int, program: Sequence[str]) -> StartOrder:
        base = self._directory / f"worker-{number}"
        module = program[0] == "-m"
        for name in (f"{base}.out", f"{base}.err"):
            Path(name).write_text("")
        return StartOrder(
            spawn=number,
            program=Program(
                entry="module" if module else "script",
                target=program[1] if module else program[0],
                args=list(program[2 if module else 1 :]),
                error_file=f"{base}.error.json",
                slot=number,
                modules_file=f"{base}.modules.json",
            ),
            env=self._env,
            stdout=f"{base}.out",
            stderr=f"{base}.err",
        )

    def _worker(self, order: StartOrder, status: int) -> Worker:
        stdout, stderr = (Path(path).read_text() for path in (order.stdout, order.stderr))
        return Worker(
            Ended(os.waitstatus_to_exitcode(status), stdout, stderr).without_addresses(),
            read_json(order.program.error_file),
            Board(self._board_fd).read(order.program.slot),
            read_json(order.program.modules_file),
        )


def read_json(path: str):
    return json.loads(Path(path).read_text()) if Path(path).exists() else None


def write(directory: Path, **modules: str) -> None:
    for name, source in modules.items():
        (directory / f"{name}.py").write_text(textwrap.dedent(source))


def run_both(directory: Path, *program: str, **variables: str) -> tuple[Ended, Worker]:
    (worker,) = Zygote(directory, **variables).run(program)
    return plain(directory, *program, **variables), worker


def check_same(directory: Path, source: str, *program: str, **variables: str) -> Worker:
    """Run a program by python and as a worker; all that it leaves must be the same."""
    write(directory, program=source)
    expected, worker = run_both(directory, *(program or ("program.py",)), **variables)
    assert worker.ended == expected
    return worker


ERRORS = {
    "exception": """
        def deep(number):
            if number == 0:
                raise ValueError("bad value", number)
            deep(number - 1)

        deep(3)
        """,
    "cause": """
        def first():
            return {}["key"]

        try:
            first()
        except KeyError as error:
            raise RuntimeError("second") from error
        """,
    "context": """
        try:
            1 / 0
        except ZeroDivisionError:
            undefined
        """,
    "no context": """
        try:
            1 / 0
        except ZeroDivisionError:
            raise OSError(28, "No space left on device", "/data") from None
        """,
    "without message": "class Own(Exception): pass\nraise Own",
    "without words": """
        class Own(Exception):
            def __str__(self):
                raise RuntimeError("no words")
        raise Own
        """,
    "text of many lines": "raise ValueError('first\\nsecond')",
    "text of other alphabets": "raise ValueError('\\u96f7 \\udcff')",
    "base exception": "class Own(BaseException): pass\nraise Own('all the way')",
    "generator exit": "raise GeneratorExit",
    "syntax": "def train(:\n    pass\n",
    "indentation": "def train():\npass\n",
    "import": "import helper",
    "module": "import no_such_module_anywhere.inner",
    "library": "import json; json.loads('{')",
    "own hook": """
        import sys
        sys.excepthook = lambda kind, error, frames: print(
            "hook:", kind.__name__, error, frames.tb_lineno, frames.tb_frame.f_code.co_filename,
            sys.last_value is error, file=sys.stderr,
        )
        raise ValueError("seen by the hook")
        """,
    "hook that leaves": """
        import sys
        def hook(*_):
            raise SystemExit(6)
        sys.excepthook = hook
        raise ValueError("seen by the hook")
        """,
    "error in a thread": """
        import threading
        def work():
            raise ValueError("of the thread")
        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()
        """,
    "unraisable": """
        class Bad:
            def __del__(self):
                raise ValueError("in a finalizer")
        bad = Bad()
        del bad
        """,
    "exit handler": """
        import atexit
        def handler():
            raise ValueError("in the handler")
        atexit.register(print, "first registered, last called")
        atexit.register(handler)
        raise ValueError("of the program")
        """,
}
