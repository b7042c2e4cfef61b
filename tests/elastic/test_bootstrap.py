"""A worker runs a program exactly as ``python -u`` does, whether its zygote is cold or warm."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from dlrover.agent.zygote import Order
from dlrover.agent.zygotes import ZygoteProcess, make_board
from dlrover.elastic.progress import Board, Slot

pytestmark = [pytest.mark.slow]


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
        self._directory = directory
        self._env = {**os.environ, **variables}
        self._board_fd = make_board()
        self._preload = ""
        if preload:
            self._preload = str(directory / "preload.json")
            Path(self._preload).write_text(json.dumps({"own": {}, **preload}))

    def run(self, *programs: Sequence[str], strike: signal.Signals | None = None) -> list[Worker]:
        """Run programs, given as the arguments of python, one after another."""
        os_directory = os.getcwd()
        os.chdir(self._directory)
        try:
            return asyncio.run(self._run(programs, strike))
        finally:
            os.chdir(os_directory)
            os.close(self._board_fd)

    async def _run(self, programs, strike: signal.Signals | None) -> list[Worker]:
        exited: asyncio.Queue[int] = asyncio.Queue()
        pids: list[int] = []
        zygote = ZygoteProcess(
            sys.executable,
            self._env,
            self._board_fd,
            self._preload,
            lambda _, pid: pids.append(pid),
            lambda _, status: exited.put_nowait(status),
            lambda _: exited.put_nowait(-1),
        )
        workers = []
        for number, program in enumerate(programs):
            order = self._order(number, program)
            zygote.spawn(order)
            if strike is not None:
                while b"ready" not in Path(order.stdout).read_bytes():
                    await asyncio.sleep(0.01)
                os.kill(pids[-1], strike)
            status = await asyncio.wait_for(exited.get(), 20)
            workers.append(self._worker(order, status))
        self.problem = zygote.problem
        zygote.close()
        await zygote.wait()
        return workers

    def _order(self, number: int, program: Sequence[str]) -> Order:
        base = self._directory / f"worker-{number}"
        module = program[0] == "-m"
        for name in (f"{base}.out", f"{base}.err"):
            Path(name).write_text("")
        return Order(
            spawn=number,
            entry="module" if module else "script",
            target=program[1] if module else program[0],
            args=list(program[2 if module else 1 :]),
            env=self._env,
            stdout=f"{base}.out",
            stderr=f"{base}.err",
            error_file=f"{base}.error.json",
            slot=number,
            modules_file=f"{base}.modules.json",
        )

    def _worker(self, order: Order, status: int) -> Worker:
        stdout, stderr = (Path(path).read_text() for path in (order.stdout, order.stderr))
        return Worker(
            Ended(os.waitstatus_to_exitcode(status), stdout, stderr).without_addresses(),
            read_json(order.error_file),
            Board(self._board_fd).read(order.slot),
            read_json(order.modules_file),
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


# ---- how a program ends

EXITS = {
    "falls off the end": "print('done')",
    "exit": "import sys; sys.exit()",
    "exit 0": "raise SystemExit(0)",
    "exit 3": "exit(3)",
    "exit 256": "raise SystemExit(256)",
    "exit -1": "raise SystemExit(-1)",
    "exit True": "raise SystemExit(True)",
    "exit of 64 bits": "raise SystemExit(2**40 + 5)",
    "exit text": "raise SystemExit('what went wrong: \\u00fc')",
    "exit tuple": "raise SystemExit(1, 2)",
    "exit object": "raise SystemExit([None])",
    "exit subclass": "class Leave(SystemExit): pass\nraise Leave(4)",
    "os._exit": "import os; print('before'); os._exit(7)",
    "abort": "import os, faulthandler; faulthandler.disable(); os.abort()",
    "exit in a thread": "import threading, sys; threading.Thread(target=sys.exit, args=(9,)).start()",
    "exit in an exit handler": "import atexit, sys; atexit.register(sys.exit, 8)",
    "stdout lost": "import os; print('x'); os.close(1); print('y')",
}


@pytest.mark.parametrize("case", EXITS)
def test_exit_codes_are_the_interpreters(tmp_path: Path, case: str) -> None:
    worker = check_same(tmp_path, EXITS[case])
    if "lost" not in case:
        assert worker.error is None


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


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_reported_as_by_the_interpreter(tmp_path: Path, case: str) -> None:
    write(tmp_path, helper="def broken(\n")
    worker = check_same(tmp_path, ERRORS[case])
    assert (worker.error is None) == (case in {"error in a thread", "unraisable"})


def test_a_program_without_excepthook_is_reported_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, program="import sys; del sys.excepthook; raise ValueError('seen')")
    (worker,) = Zygote(tmp_path).run(["program.py"])
    assert worker.ended.code == 1
    assert worker.ended.stderr.endswith("ValueError: seen\n")
    assert worker.error["message"]["message"] == "ValueError: seen"


MODULE_ERRORS = {
    "raises": (["-m", "package.inner"], "ValueError: in a module"),
    "exits": (["-m", "package.leaves", "5"], ""),
    "package": (["-m", "package"], "ZeroDivisionError"),
    "not there": (["-m", "package.nowhere"], "No module named package.nowhere"),
    "no main": (["-m", "package.sub"], "cannot be directly executed"),
    "directory": (["package"], "ZeroDivisionError"),
    "directory without main": (["package/sub"], "can't find '__main__' module"),
}


@pytest.mark.parametrize("case", MODULE_ERRORS)
def test_modules_and_directories_fail_as_with_python(tmp_path: Path, case: str) -> None:
    (tmp_path / "package/sub").mkdir(parents=True)
    write(
        tmp_path / "package",
        __init__="",
        __main__="1 / 0",
        inner="raise ValueError('in a module')",
        leaves="import sys; print(__name__, sys.argv); raise SystemExit(int(sys.argv[1]))",
    )
    write(tmp_path / "package/sub", __init__="")
    program, message = MODULE_ERRORS[case]
    expected, worker = run_both(tmp_path, *program)
    assert worker.ended == expected
    assert message in expected.stderr


def test_an_interrupt_ends_a_program_by_its_signal(tmp_path: Path) -> None:
    source = """
        import signal, sys
        try:
            print("ready", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
            signal.pause()
        finally:
            print("cleaned up")
        """
    write(tmp_path, program=source)
    (worker,) = Zygote(tmp_path).run(["program.py"], strike=signal.SIGINT)
    assert worker.ended.code == -signal.SIGINT
    assert worker.ended.stdout == "ready True\ncleaned up\n"
    lines = worker.ended.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{tmp_path}/program.py"')
    assert lines[-1] == "KeyboardInterrupt"


# ---- what a program sees

SIGHTS = {
    "its own module": """
        import __main__, inspect, pickle, sys

        class Thing:
            pass

        def function():
            return 1

        print(__main__.Thing is Thing, pickle.loads(pickle.dumps(Thing)) is Thing)
        print(inspect.getsource(function), inspect.getfile(function))
        print({name: repr(value) for name, value in vars(__main__).items() if name[:2] == "__"})
        print(sys.argv, sys.path, sys.flags, sys.warnoptions)
        """,
    "annotations": """
        import dataclasses

        @dataclasses.dataclass
        class Options:
            lr: float = 0.1

        def train(step: int) -> None: ...

        print(dataclasses.fields(Options)[0].type, train.__annotations__)
        """,
    "an old file": "print(__file__)",
    "a coding line": "# coding: latin-1\nprint(ascii('\u00e4'))",
    "a docstring": '"""Says."""\nprint(__doc__)',
    "a future": "from __future__ import annotations\ndef f(x: int): ...\nprint(f.__annotations__)",
    "warning filters": """
        import warnings
        print(warnings.filters)
        warnings.warn("of main", DeprecationWarning)
        warnings.warn("user's")
        import helper
        """,
    "threads and exit handlers": """
        import atexit, threading, time, weakref

        class Object:
            pass

        kept = Object()
        weakref.finalize(kept, print, "finalized")
        atexit.register(print, "exit handler")
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread ends"))).start()
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        print("main ends")
        """,
    "a main that is used after its end": """
        import atexit, pickle

        class Thing:
            pass

        atexit.register(lambda: print(pickle.loads(pickle.dumps(Thing())), __name__))
        Thing.__repr__ = lambda self: "a thing"
        """,
    "logging": """
        import logging
        logging.warning("before configuration")
        logging.getLogger("a.b").info("not shown")
        """,
    "signals": """
        import signal
        print({s.name: str(signal.getsignal(s)) for s in signal.Signals})
        """,
    "recursion": """
        import sys
        def depth(n):
            return depth(n + 1) if n < 900 else n
        print(sys.getrecursionlimit(), depth(0))
        """,
}


@pytest.mark.parametrize("case", SIGHTS)
def test_a_program_sees_what_it_sees_under_python(tmp_path: Path, case: str) -> None:
    write(tmp_path, helper="import warnings; warnings.warn('old', DeprecationWarning)")
    check_same(tmp_path, SIGHTS[case], "program.py", "arg", "--flag=1")


SPREADS = """
    import multiprocessing, os, sys

    class Thing:
        def __init__(self, number):
            self.number = number

    def work(thing):
        return type(thing).__module__, thing.number * 2, __name__, sys.argv

    if __name__ == "__main__":
        for method in ("fork", "spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                print(method, pool.map(work, [Thing(1), Thing(2)]))
    """


@pytest.mark.parametrize("program", [["program.py"], ["-m", "package.program"]], ids=len)
def test_a_program_may_start_processes_of_its_own(tmp_path: Path, program: list[str]) -> None:
    (tmp_path / "package").mkdir()
    write(tmp_path / "package", program=SPREADS)
    worker = check_same(tmp_path, SPREADS, *program)
    assert worker.ended.stdout.count("\n") == 3


def test_a_compiled_program_runs(tmp_path: Path) -> None:
    write(tmp_path, source="import sys; print(__file__, __name__, sys.argv)")
    command = [sys.executable, "-c", "import py_compile; py_compile.compile('source.py', 'p.pyc')"]
    subprocess.run(command, cwd=tmp_path, check=True)
    expected, worker = run_both(tmp_path, "p.pyc", "x")
    assert worker.ended == expected


def test_a_crash_shows_where_the_program_was(tmp_path: Path) -> None:
    source = """
        import ctypes
        def crash():
            ctypes.string_at(0)
        crash()
        """
    write(tmp_path, program=source)
    (worker,) = Zygote(tmp_path).run(["program.py"])
    assert worker.ended.code == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in worker.ended.stderr
    assert f'File "{tmp_path}/program.py", line 4 in crash' in worker.ended.stderr


# ---- a warm zygote


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A directory that counts as one of installed packages."""
    directory = tmp_path / "site-packages"
    directory.mkdir()
    return directory


def run_warm(directory: Path, preload: dict, *programs: Sequence[str]) -> list[Worker]:
    """Run programs as workers of a zygote that has imported modules, which must not be a problem."""
    zygote = Zygote(directory, preload, PYTHONPATH=str(directory / "site-packages"))
    workers = zygote.run(*programs)
    assert not zygote.problem
    return workers


def problem_of(directory: Path, preload: dict) -> str:
    zygote = Zygote(directory, preload, PYTHONPATH=str(directory / "site-packages"))
    zygote.run(["program.py"])
    return zygote.problem


def test_a_warm_zygote_has_imported_what_its_workers_need(
    tmp_path: Path, packages: Path, capfd
) -> None:
    write(packages, installed="print('imported', __name__)\nimport json.tool")
    write(tmp_path, program="import sys, installed; print('json.tool' in sys.modules)")
    workers = run_warm(tmp_path, {"names": ["installed"]}, ["program.py"], ["program.py"])
    assert [worker.ended for worker in workers] == [Ended(0, "True\n", "")] * 2
    assert capfd.readouterr() == ("", "")


def test_what_importing_does_to_a_process_is_there_in_a_fork(
    tmp_path: Path, packages: Path
) -> None:
    source = """
        import atexit, os, sys, warnings
        os.environ.setdefault("KMP_INIT_AT_FORK", "FALSE")
        os.environ["PATH"] += ":/opt/installed"
        os.environ.pop("TO_REMOVE", None)
        warnings.filterwarnings("error", message="of this kind")
        warnings.warn("while importing")
        sys.path.append("/added")
        atexit.register(print, "exit handler of the package")
        """
    write(packages, installed=source)
    source = """
        import installed, os, sys, warnings
        print(os.environ["KMP_INIT_AT_FORK"], os.environ["PATH"], os.environ.get("TO_REMOVE"))
        print(warnings.filters, warnings.showwarning.__module__)
        print([path for path in sys.path if "zip" not in path])
        """
    write(tmp_path, program=source)
    variables = {"PYTHONPATH": str(packages), "TO_REMOVE": "x"}
    expected = plain(tmp_path, "program.py", **variables)
    (worker,) = Zygote(tmp_path, {"names": ["installed"]}, **variables).run(["program.py"])
    assert worker.ended.code == expected.code == 0
    assert worker.ended.stdout == expected.stdout
    assert "while importing" in expected.stderr  # this alone a fork has no reason to repeat
    assert worker.ended.stderr == ""


@pytest.mark.parametrize("source", ["os.environ['LOCAL_RANK']", "os.getenv('RANK', '0')"])
def test_modules_that_ask_for_their_rank_are_not_imported_ahead(
    tmp_path: Path, packages: Path, source: str
) -> None:
    write(packages, installed=f"import os; rank = {source}")
    write(tmp_path, program="import installed; print(installed.rank)")
    problem = problem_of(tmp_path, {"names": ["installed"]})
    assert "RANK, which only workers have" in problem


def test_modules_with_threads_are_not_imported_ahead(tmp_path: Path, packages: Path) -> None:
    thread = "threading.Thread(target=time.sleep, args=(9,), daemon=True, name='beat').start()"
    write(packages, installed=f"import threading, time; {thread}")
    write(tmp_path, program="")
    assert problem_of(tmp_path, {"names": ["installed"]}) == "importing started threads: beat"


def test_modules_that_open_a_device_are_not_imported_ahead(tmp_path: Path, packages: Path) -> None:
    """As asking a driver for its accelerators does."""
    device = next((path for path in ("/dev/fuse", "/dev/net/tun") if os.access(path, os.R_OK)), "")
    if not device:
        pytest.skip("this process may open no device")
    write(packages, installed=f"held = [open(path) for path in ({device!r}, '/dev/null')]")
    write(tmp_path, program="")
    assert problem_of(tmp_path, {"names": ["installed"]}) == f"importing opened {device}"


def test_a_module_that_fails_to_import_is_the_workers_to_report(
    tmp_path: Path, packages: Path
) -> None:
    write(packages, installed="raise ValueError('broken package')", other="")
    write(tmp_path, program="import other, installed")
    names = ["installed", "no_longer_there", "other"]
    (worker,) = run_warm(tmp_path, {"names": names}, ["program.py"])
    assert worker.ended.stderr.endswith("ValueError: broken package\n")
    assert worker.error["message"]["message"] == "ValueError: broken package"


LISTS = """
    import json, sys
    sys.path.append("..")
    import helper, installed, shared
    from dlrover.elastic import bootstrap
    with open("loaded.json", "w") as file:
        json.dump(bootstrap.loaded_modules(), file)
    print(shared.__file__)
    """


def test_a_programs_own_modules_come_before_installed_ones(tmp_path: Path, packages: Path) -> None:
    """A package imports a module that the program replaces: so must it be after a restart."""
    write(packages, installed="import shared", shared="")
    write(tmp_path, program=LISTS, helper="", shared="")
    (cold,) = Zygote(tmp_path, PYTHONPATH=str(packages)).run(["program.py"])
    assert cold.ended == Ended(0, f"{tmp_path}/shared.py\n", "")
    loaded = read_json(tmp_path / "loaded.json")
    own = {name: f"{tmp_path}/{name}.py" for name in ("helper", "shared")}
    assert "installed" in loaded["names"]
    assert loaded["own"] == own
    expected = "importing loaded other modules than the program's: shared"
    assert problem_of(tmp_path, loaded) == expected


def test_a_restart_runs_the_program_as_it_is_now(tmp_path: Path, packages: Path) -> None:
    write(packages, installed="", shared="")
    write(tmp_path, program=LISTS, helper="")
    (cold,) = Zygote(tmp_path, PYTHONPATH=str(packages)).run(["program.py"])
    loaded = read_json(tmp_path / "loaded.json")
    assert cold.ended.stdout == f"{packages}/shared.py\n"
    assert loaded["own"] == {"helper": f"{tmp_path}/helper.py"}
    write(tmp_path, helper="print('a new helper')")
    (worker,) = run_warm(tmp_path, loaded, ["program.py"])
    assert worker.ended.stdout == f"a new helper\n{packages}/shared.py\n"
    write(tmp_path, program="import sys; print('installed' in sys.modules)\nimport broken_now")
    (worker,) = run_warm(tmp_path, loaded, ["program.py"])
    assert (worker.ended.code, worker.ended.stdout) == (1, "True\n")


def test_modules_of_the_current_directory_are_not_imported_ahead(
    tmp_path: Path, packages: Path
) -> None:
    """The program lies elsewhere, so it took the installed module of this name."""
    (tmp_path / "source").mkdir()
    write(packages, shared="")
    write(tmp_path, shared="raise SystemExit('wrong module')")
    write(tmp_path / "source", program="import shared; print(shared.__file__)")
    (worker,) = run_warm(tmp_path, {"names": ["shared"]}, ["source/program.py"])
    assert worker.ended == Ended(0, f"{packages}/shared.py\n", "")


def test_forks_draw_different_random_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    source = """
        import numpy, random, uuid, tempfile
        print(random.random(), numpy.random.rand(), uuid.uuid4(), tempfile.mktemp())
        """
    write(tmp_path, program=source)
    names = ["random", "tempfile", "uuid", *(["numpy", "numpy.random"] if numpy else [])]
    first, second = run_warm(tmp_path, {"names": names}, ["program.py"], ["program.py"])
    drawn = [set(worker.ended.stdout.split()) for worker in (first, second)]
    assert len(drawn[0]) == 4
    assert not drawn[0] & drawn[1]


@pytest.mark.parametrize("case", ["exception", "context", "syntax", "own hook", "exit handler"])
def test_errors_look_the_same_in_a_warm_fork(tmp_path: Path, case: str) -> None:
    write(tmp_path, program=ERRORS[case])
    expected = plain(tmp_path, "program.py")
    (worker,) = run_warm(tmp_path, {"names": ["json.tool", "random"]}, ["program.py"])
    assert worker.ended == expected


# ---- PyTorch

STEPS = """
    import torch

    class Own(torch.optim.SGD):
        pass

    def parameter():
        return torch.nn.Parameter(torch.zeros(1))

    first, second = Own([parameter()]), torch.optim.Adagrad([parameter()])
    for _ in range(5):
        for optimizer in (first, second):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
            optimizer.step()
    print(type(first.step).__name__, second.state_dict()["param_groups"][0]["lr"])
    """


@pytest.mark.torch
@pytest.mark.timeout(60)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_the_steps_of_the_first_optimizer_are_counted(tmp_path: Path, warm: bool) -> None:
    pytest.importorskip("torch")
    write(tmp_path, program=STEPS)
    began = time.time()
    zygote = Zygote(tmp_path, {"names": ["torch"]} if warm else None)
    (worker,) = zygote.run(["program.py"])
    assert worker.ended == Ended(0, "method 0.01\n", "")
    assert worker.slot.steps == 5
    assert began < worker.slot.first_step <= worker.slot.last_step < time.time()
    assert worker.slot.modules_listed
    assert "torch.optim.adagrad" in worker.modules["names"]
    assert not zygote.problem


@pytest.mark.torch
def test_the_hook_on_the_import_leaves_no_trace(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = """
        import importlib.util, inspect, sys, torch
        module = sys.modules["torch.optim.optimizer"]
        print(type(module.__loader__), type(module.__spec__.loader), module.__spec__.origin[-12:])
        print(type(importlib.util.find_spec(module.__name__).loader), len(inspect.getsource(module)))
        import torch._dynamo.callback
        import torch.distributed.checkpoint
        import transformers.trainer_callback
        print([type(finder).__module__ for finder in sys.meta_path])
        """
    write(tmp_path, program=source)
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "trainer_callback.py").write_text(
        "class CallbackHandler:\n    def on_train_begin(self): ...\n"
    )
    (worker,) = Zygote(tmp_path).run(["program.py"])
    assert worker.ended == plain(tmp_path, "program.py")


@pytest.mark.torch
def test_what_record_has_written_is_kept(tmp_path: Path) -> None:
    """torch's own decorator writes the error file first."""
    pytest.importorskip("torch")
    source = """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("recorded by torch")

        main()
        """
    write(tmp_path, program=source)
    error_file = str(tmp_path / "worker-0.error.json")
    (worker,) = Zygote(tmp_path, TORCHELASTIC_ERROR_FILE=error_file).run(["program.py"])
    assert worker.ended.code == 1
    assert worker.ended.stderr.endswith("ValueError: recorded by torch\n")
    assert worker.error["message"]["message"] == "ValueError: recorded by torch"
    assert "time" not in worker.error["message"]["extraInfo"]  # which ours would have


@pytest.mark.torch
def test_forks_draw_different_numbers_from_torch(tmp_path: Path) -> None:
    """As new processes do, unless the program sets a seed."""
    pytest.importorskip("torch")
    source = "import torch; print(torch.initial_seed(), torch.rand(1).item())"
    write(tmp_path, program=source)
    first, second = run_warm(tmp_path, {"names": ["torch"]}, ["program.py"], ["program.py"])
    drawn = [set(worker.ended.stdout.split()) for worker in (first, second)]
    assert len(drawn[0]) == len(drawn[1]) == 2
    assert not drawn[0] & drawn[1]
