"""A worker runs a program exactly as ``python -u`` does, whether its zygote is cold or warm."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.training.worker import bootstrap
from tests.training.programs import ERRORS, Zygote, check_same, run_both, write

pytestmark = [pytest.mark.slow]

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
    "kill": "import os; os.kill(os.getpid(), 9)",
    "raise_signal": "import signal; signal.raise_signal(signal.SIGTERM)",
    "handled": "import signal, os; signal.signal(15, lambda *_: print(5)); os.kill(os.getpid(), 15)",
    "exit of a child": "import os, sys\nif os.fork(): print(os.wait()[1])\nelse: sys.exit(3)",
    "kill of a child": (
        "import os, signal\nif os.fork(): print(os.wait()[1])\nelse: os.kill(os.getpid(), 9)"
    ),
}
ENDS = {
    "os._exit": "os._exit",
    "abort": "os.abort",
    "kill": "os.kill",
    "raise_signal": "signal.raise_signal",
}
QUIET = frozenset(
    {
        "falls off the end", "exit", "exit 0", "exit in a thread", "exit in an exit handler", "handled",
        "exit of a child", "kill of a child",
    }
)  # fmt: skip
"""Ends that are not the program's own doing, or no failures."""


@pytest.mark.parametrize("case", EXITS)
def test_exit_codes_are_the_interpreters(tmp_path: Path, case: str) -> None:
    worker = check_same(tmp_path, EXITS[case])
    if "lost" not in case:
        ends = (worker.error or {}).get("message", {}).get("errorType")
        assert ends == ENDS.get(case, None if case in QUIET else "SystemExit")


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


def test_the_last_step_that_a_program_has_recorded(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert bootstrap.recorded_step(path) == 0
    path.write_text("")
    assert bootstrap.recorded_step(path) == 0
    path.write_text('{"step": 1}\n{"step": 2, "loss": 0.5}\n{"ste')
    assert bootstrap.recorded_step(path) == 2
