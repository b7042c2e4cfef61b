"""Runs a user's Python program in a worker process as ``python -u`` would, and watches it.

Three things are added, none of which the program can see: `faulthandler` writes the stacks of a crash to
standard error; an exception that reaches the top is recorded in the worker's error file, in torchrun's
format, without a decorator in user code; and when PyTorch gets imported its optimizers count their steps
on the node's progress board.

Only the standard library is imported here: the program decides what else its process loads.
"""

from __future__ import annotations

import builtins
import faulthandler
import importlib.abc
import importlib.machinery
import io
import json
import os
import runpy
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover.elastic.progress import Board

OPTIMIZER_MODULE = "torch.optim.optimizer"


@dataclass(frozen=True)
class Program:
    """What a worker runs and where it leaves its traces."""

    entry: str
    """``script``, ``module`` or ``run_path``: see ``dlrover.spec.launch.Entry``."""
    target: str
    args: Sequence[str]
    error_file: str
    """Where an exception is recorded; empty for nowhere."""
    slot: int
    """The worker's slot on the progress board."""
    modules_file: str = ""
    """Where the names of imported modules go at the first step; empty for nowhere."""


def run(program: Program, board: Board | None) -> int:
    """Run the program to its end; the exit code of its process."""
    faulthandler.enable(sys.__stderr__ or 2)
    if board is not None:
        _count_optimizer_steps(board, program)
    try:
        _execute(program)
    except SystemExit as exit_request:
        return _exit_code(exit_request.code)
    except BaseException as error:  # noqa: BLE001 - the top of the program: everything ends here
        _report(error, program.error_file)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _execute(program: Program) -> None:
    sys.argv = [program.target, *program.args]
    if program.entry == "module":
        sys.argv[0] = ""  # as with python -m: runpy sets it to the module's path
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    elif program.entry == "run_path" or not Path(program.target).is_file():
        runpy.run_path(program.target, run_name="__main__")  # also directories and zip files
    else:
        _run_script(program.target)


def _run_script(target: str) -> None:
    sys.path[0] = str(Path(target).resolve().parent)
    module = types.ModuleType("__main__")
    module.__file__ = target
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    with io.open_code(str(Path(target).resolve())) as file:
        code = compile(file.read(), target, "exec")
    exec(code, module.__dict__)  # noqa: S102 - running the user's program is the purpose


def _exit_code(code: object) -> int:
    """The exit code of ``SystemExit(code)``, as the interpreter defines it."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)  # noqa: T201 - what the interpreter does
    return 1


def _report(error: BaseException, error_file: str) -> None:
    """Print a traceback as the interpreter would, without our own frames, and record it."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    error = error.with_traceback(frames)
    sys.excepthook(type(error), error, frames)
    if error_file and not Path(error_file).exists():  # torch's @record may have written it
        _write_atomically(error_file, json.dumps(describe(error)))


def describe(error: BaseException) -> dict[str, Any]:
    """An exception in the format of torch's error files; its type and exact time are added."""
    now = time.time()
    return {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "errorType": type(error).__qualname__,
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(now)),
                "time": now,
            },
        }
    }


def _is_ours(filename: str) -> bool:
    return (
        filename == __file__ or filename.startswith("<frozen runpy>") or filename == runpy.__file__
    )


def _write_atomically(path: str, text: str) -> None:
    temporary = f"{path}.{os.getpid()}"
    try:
        Path(temporary).write_text(text)
        Path(temporary).replace(path)
    except OSError as error:  # a full disk must not hide the program's own error
        print(f"dlrover: {path} could not be written: {error}", file=sys.stderr)  # noqa: T201


# ---- optimizer steps


def _count_optimizer_steps(board: Board, program: Program) -> None:
    counter = _StepCounter(board, program)
    loaded = sys.modules.get(OPTIMIZER_MODULE)
    if loaded is not None:
        counter.attach(loaded)
    else:
        sys.meta_path.insert(0, _AfterImport(OPTIMIZER_MODULE, counter.attach))


class _StepCounter:
    """Counts the steps of the first optimizer that makes one (a GAN's second one is not counted)."""

    def __init__(self, board: Board, program: Program) -> None:
        self._board = board
        self._slot = program.slot
        self._modules_file = program.modules_file
        self._optimizer: object = None

    def attach(self, module: types.ModuleType) -> None:
        """Use PyTorch's hook for all optimizers."""
        module.register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: object, _args: object, _kwargs: object) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is self._optimizer and self._board.count_step(self._slot) == 1:
            self._list_modules()

    def _list_modules(self) -> None:
        if self._modules_file:
            _write_atomically(self._modules_file, json.dumps(importable_modules()))
            self._board.mark_modules_listed(self._slot)


def importable_modules() -> list[str]:
    """Names of loaded modules of installed packages, in the order in which they were loaded.

    The user's own modules are left out: they may change between two runs, and importing them may do
    anything.
    """
    roots = tuple({str(Path(os.__file__).parent), *(p for p in sys.path if "-packages" in p)})
    names = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        installed = isinstance(origin, str) and origin.startswith(roots)
        if installed and name != "__main__" and not name.startswith("dlrover"):
            names.append(name)
    return names


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``then(module)`` once, right after the module called ``name`` has been executed."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the awaited module as usual, with its loader wrapped."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._then)
        return spec


class _CallingLoader(importlib.abc.Loader):
    def __init__(
        self, loader: importlib.abc.Loader, then: Callable[[types.ModuleType], None]
    ) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)
