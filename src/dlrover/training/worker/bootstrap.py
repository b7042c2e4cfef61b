"""The runner of a user's Python program in a worker process: behaves like ``python -u`` and watches it.

It adds three things, none visible to the program. `faulthandler` writes the stacks of a crash to
standard error. An exception that reaches the top is recorded in the worker's error file, in torchrun's
format, without a decorator in user code. When the program imports PyTorch, hooks record the training's
activity on the node's progress board.

Apart from this package, the module imports only the standard library: the program decides what else its
process loads.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrover import launched
from dlrover.training.worker import (
    hooks,
    ownends,
    stacks,
    tracker,
)
from dlrover.training.worker.progress import Board

STEPS_TAIL = 1 << 16
"""Bytes at the end of a step file that are searched for its last line."""
OWN_DIRECTORIES = (
    os.path.dirname(__file__),
    os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "agent", "workers"),
)
"""Directories of the runner's own code, hidden from tracebacks: this package and the zygote's."""
AROUND_TORCH = os.path.join(os.path.dirname(os.path.dirname(__file__)), "replicas")
"""Directory of the code that ``--survive`` puts around PyTorch's, hidden unless the mistake is in it or no other frame is left."""


@dataclass(frozen=True)
class Program:
    """The program of a worker, with its settings and output files."""

    entry: str
    """``script``, ``module`` or ``run_path``: see ``dlrover.spec.job.Entry``."""
    target: str
    args: Sequence[str]
    error_file: str
    """File that records an exception; empty: none."""
    slot: int
    """The worker's slot on the progress board."""
    modules_file: str = ""
    """File that lists the imported modules after the first step; empty: none."""
    steps_file: str = ""
    """File in which the program itself records its steps; empty: none."""
    given: launched.Given = field(default_factory=launched.Given)


def run(program: Program, board: Board | None, loaded: Sequence[str] = ()) -> None:
    """Run the program to its end; record any exception and re-raise it for the interpreter.

    ``loaded``: the modules that DLRover has loaded here, which a new process would not have.

    Call it last in a process that runs nothing else. The interpreter then prints the error, chooses the
    exit code and waits for threads, as for any program.
    """
    faulthandler.enable(sys.__stderr__ or 2)
    launched.given = program.given
    if board is not None:
        stacks.prepare()
        watched = tracker.watch(board, program.slot)
        launched.reading = watched.reads
        hooks.install(watched, _first_step(watched, board, program))
    if program.given.survive:
        # By name: agents import this module, and never anything that may import torch.
        importlib.import_module("dlrover.training.replicas.hooks").install()
    pid = os.getpid()
    signals = ownends.Received(pid)
    finished = functools.partial(_mark_finished, board, program.slot, pid)
    if program.error_file:
        ownends.watch_signals(signals)
        ownends.watch(
            lambda end: _record(program, end), signals, lambda: _leave(program, signals, finished)
        )
    launched.leaves = lambda: signals.leaves
    try:
        try:
            execute(program, loaded)
        except Exception as error:
            launched.failed(error)
            raise
        except SystemExit as end:
            if end.code in (None, 0):
                _finish(signals, finished)
            raise
        finished()
    except SystemExit as end:
        if end.code not in (None, 0):
            end.__traceback__ = _without_ours(end)
            _failed(program, board, pid, describe(end, "SystemExit", signals.lately()))
        raise
    except BaseException as error:
        handled_signal = signals.behind(error.__traceback__)
        _hide_own_frames(error)
        _failed(program, board, pid, describe(error, handled_signal=handled_signal))
        raise


def _failed(program: Program, board: Board | None, pid: int, error: dict[str, Any]) -> None:
    """Record the error that has ended the program of process ``pid``, not of a child; threads of it may go on."""
    if os.getpid() != pid:
        return
    _record(program, error)
    if board is not None:
        board.mark_failed(program.slot)


def _mark_finished(board: Board | None, slot: int, pid: int) -> None:
    """Record the end of the program of process ``pid``, once all that depends on it is done."""
    launched.finished()
    if board is not None and os.getpid() == pid:
        board.mark_finished(slot)


def _finish(signals: ownends.Received, finished: Callable[[], None]) -> None:
    """Finish the training, unless this process ends for a signal while others train: that is the loss of a rank.

    Raises:
        SystemExit: It does; the code says for which signal.
    """
    if signals.leaves and launched.trains():
        raise SystemExit(128 + signals.leaves)
    finished()


def _leave(program: Program, signals: ownends.Received, finished: Callable[[], None]) -> int:
    """Finish the training for a program that ends its process at once; return the exit code."""
    try:
        _finish(signals, finished)
    except SystemExit as end:
        if end.code:
            _record(program, describe(end, "SystemExit", signals.lately()))
        return int(end.code or 0)
    except Exception as error:  # noqa: BLE001 - the process ends, whatever it is
        traceback.print_exc()
        _record(program, describe(error))
        return 1
    return 0


def _record(program: Program, error: dict[str, Any]) -> None:
    """Write the program's end to its error file, unless the file exists."""
    if program.error_file and not Path(program.error_file).exists():
        _write_atomically(program.error_file, json.dumps(error))


def _first_step(watched: tracker.Tracker, board: Board, program: Program) -> Callable[[], None]:
    """Return the callback for the end of the first step, when all needed modules are imported."""

    def first_step() -> None:
        if program.modules_file:
            _write_atomically(program.modules_file, json.dumps(loaded_modules()))
            board.mark_modules_listed(program.slot)
        if program.steps_file:
            watched.recorded(recorded_step(Path(program.steps_file)))

    return first_step


def recorded_step(path: Path) -> int:
    """Return the last ``step`` in a file of JSON lines, 0 without any; ignore an unfinished last line."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - STEPS_TAIL))
            data = file.read()
    except FileNotFoundError:
        return 0
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


def execute(program: Program, loaded: Sequence[str] = ()) -> None:
    """Run the program as ``python`` does: its ``__main__``, its arguments and its search path.

    ``loaded`` as for `run`.
    """
    sys.argv = [program.target, *program.args]
    is_folder = program.entry == "script" and pkgutil.get_importer(program.target) is not None
    if program.entry in ("run_path", "module"):
        _add_to_path(os.getcwd())
    elif is_folder:  # a directory or a zip file
        sys.path.insert(0, _absolute(program.target))
    else:
        _add_to_path(str(Path(program.target).resolve().parent))
    _forget_hidden(loaded)
    if program.entry == "run_path":
        runpy.run_path(program.target, run_name="__main__")
        return
    namespace = _new_main()
    if program.entry == "module":
        _run_module(program.target, alter_argv=True)
    elif is_folder:
        _run_module("__main__", alter_argv=False)
    else:
        _run_script(program.target, namespace)


def _run_module(name: str, *, alter_argv: bool) -> None:
    # The function that the interpreter itself calls. runpy's public functions replace __main__, and remove
    # the replacement before threads and exit handlers have finished with it.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # noqa: SLF001


def _run_script(target: str, namespace: dict[str, Any]) -> None:
    path = _absolute(target)
    namespace["__file__"] = path
    namespace["__cached__"] = None
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # if already compiled
        namespace["__loader__"] = (
            importlib.machinery.SourceFileLoader("__main__", path)
            if code is None
            else importlib.machinery.SourcelessFileLoader("__main__", path)
        )
        if code is None:
            file.seek(0)
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, namespace)  # noqa: S102 - running the user's program is the purpose


def _absolute(path: str) -> str:
    """Make a path absolute as the interpreter does: without resolving ``.``, ``..`` or symbolic links."""
    return os.path.join(os.getcwd(), path)


def _add_to_path(directory: str) -> None:
    """Let the program import from its own directory, unless the interpreter runs in safe-path mode."""
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        sys.path.insert(0, directory)


def _forget_hidden(loaded: Sequence[str]) -> None:
    """Let the program import what its search path has in place of loaded modules, such as its own ``secrets.py``."""
    for name in loaded:
        ours = getattr(sys.modules.get(name), "__spec__", None)
        if ours is None or not ours.has_location:
            continue  # built-in modules come before the search path
        found = importlib.machinery.PathFinder.find_spec(name)
        if found is not None and found.has_location and not _is_same(found.origin, ours.origin):
            for part in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                del sys.modules[part]


def _is_same(one: str | None, other: str | None) -> bool:
    """Return whether these origins of modules are one, perhaps by way of a symbolic link."""
    if one is None or other is None or one == other:
        return one == other
    try:
        return os.path.samefile(one, other)
    except OSError:  # in a zip file
        return False


def _new_main() -> dict[str, Any]:
    """Put a new module in place of ``__main__``, and return its namespace, which is as in a new process.

    The collector does not look at the zygote's own (`gc.freeze`): at the interpreter's end it would not free what
    the program holds there, such as a file whose last lines are still to be written.
    """
    before = vars(sys.modules["__main__"])
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    vars(main).update((name, it) for name, it in before.items() if name.startswith("__"))
    return vars(main)


def _hide_own_frames(error: BaseException) -> None:
    """Remove our frames from the error's traceback, also where the interpreter prints it, and from those of its causes."""
    one: BaseException | None = error
    hidden: set[int] = set()
    while one is not None and id(one) not in hidden:
        one.__traceback__ = _without_ours(one)
        hidden.add(id(one))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    frames = error.__traceback__
    show = getattr(sys, "excepthook", sys.__excepthook__)  # a program may have deleted it

    def excepthook(
        kind: type[BaseException], error: BaseException, _: types.TracebackType | None
    ) -> None:
        sys.excepthook = show
        show(kind, error.with_traceback(frames), frames)

    sys.excepthook = excepthook


def _without_ours(error: BaseException) -> types.TracebackType | None:
    from dlrover.errors import DLRoverError  # noqa: PLC0415 - not needed at start

    ours = list(OWN_DIRECTORIES)
    walked = traceback.walk_tb(error.__traceback__)
    places = [place for frame, _line in walked if (place := _directory(frame)) not in ours]
    # An error without frames would not be printed as a traceback, by which the launcher knows what the program ended with.
    others = any(place != AROUND_TORCH for place in places)
    if others and (places[-1] != AROUND_TORCH or isinstance(error, DLRoverError)):
        ours.append(AROUND_TORCH)
    frames = error.__traceback__
    first = last = None
    while frames is not None:
        if _directory(frames.tb_frame) not in ours:
            if last is None:
                first = frames
            else:
                last.tb_next = frames
            last = frames
        frames = frames.tb_next
    if last is not None:
        last.tb_next = None
    return first


def _directory(frame: types.FrameType) -> str:
    return os.path.dirname(frame.f_code.co_filename)


def describe(error: BaseException, name: str = "", handled_signal: int = 0) -> dict[str, Any]:
    """Describe an exception in torch's error-file format, with its type (or ``name``) and exact time."""
    try:
        message = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the program's own method fails, as it may in any way
        message = f"{type(error).__name__}: <exception str() failed>"
    return ownends.record(
        name or type(error).__qualname__,
        message,
        "".join(traceback.format_exception(error)),
        handled_signal,
    )


def _write_atomically(path: str, text: str) -> None:
    temporary = f"{path}.{os.getpid()}"
    try:
        Path(temporary).write_text(text)
        Path(temporary).replace(path)
    except OSError as error:  # a full disk must not hide the program's own error
        print(f"dlrover: {path} could not be written: {error}", file=sys.stderr)  # noqa: T201


# ---- loaded modules


def loaded_modules() -> dict[str, Any]:
    """List the loaded modules: ``names`` from installed packages, in import order, and ``own``.

    ``own`` maps the program's other modules to their files. Do not preload them: they may change between
    two runs, and importing them may have any effect.
    """
    roots = tuple({str(Path(os.__file__).parent), *(p for p in sys.path if "-packages" in p)})
    names: list[str] = []
    own: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        file = getattr(spec, "origin", None) if getattr(spec, "has_location", False) else None
        if file is None or name.partition(".")[0] in ("__main__", "dlrover"):
            continue
        if file.startswith(roots):
            names.append(name)
        else:
            own[name] = file
    return {"names": names, "own": own}
