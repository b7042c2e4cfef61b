"""Import, in a zygote, the modules that its workers will need.

A fork must behave like a process that imports the same modules itself. The effects of an import remain in
the fork: environment variables, warning filters, exit handlers. An effect that does not survive a fork, or
that would differ in a worker, is a problem: a zygote with a problem forks no workers.

Apart from DLRover's own modules, only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import stat
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dlrover.agent.workers.generators import Generators

PER_WORKER = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
     "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
     "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
)  # fmt: skip
"""Environment variables that each worker has but its zygote lacks."""


HARMLESS_MAJORS = (1, 5)
"""Major device numbers of /dev/null, /dev/urandom and similar, and of /dev/tty and /dev/ptmx."""


@dataclass(frozen=True)
class Preloaded:
    """The effects of the imports."""

    problem: str = ""
    """Why forks would differ from new processes; empty if they would not."""
    variables: dict[str, str | None] = field(default_factory=dict)
    """New values of the environment variables that changed; None if removed."""
    generators: Generators = field(default_factory=Generators)
    """Random generators that the imports created."""


def preload(names: list[str], own: Mapping[str, str]) -> Preloaded:
    """Import modules by name.

    Skip a module that cannot be imported: the worker reports the error if it matters.

    Args:
        names: Installed modules, in import order.
        own: Names and files of the program's own modules; loading one of them from another file is a
            problem.
    """
    before = dict(os.environ)  # noqa: TID251 - to detect changes by the imports
    generators = Generators()
    with _quiet(), _rarely_collecting(), generators.watched(), _watched() as reads:
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    after = dict(os.environ)  # noqa: TID251
    changed = {
        k: after.get(k) for k in before.keys() | after.keys() if before.get(k) != after.get(k)
    }
    generators.find()
    return Preloaded("; ".join(_problems(reads, own)), changed, generators)


def _problems(reads: set[str], own: Mapping[str, str]) -> Iterator[str]:
    if threading.active_count() > 1:
        others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        yield f"importing started threads: {', '.join(others)}"
    if native := _native_threads():
        yield f"importing started {native} native thread{'' if native == 1 else 's'}"
    if initialised := _initialised_devices():
        yield f"importing initialised {', '.join(initialised)}"
    if opened := _open_devices():
        yield f"importing opened {', '.join(opened)}"
    if reads:
        yield f"importing read {', '.join(sorted(reads))}, which only workers have"
    if taken := [name for name, file in own.items() if _file_of(name) not in ("", file)]:
        yield f"importing loaded other modules than the program's: {', '.join(taken)}"


def _native_threads() -> int:
    """Return the number of threads unknown to Python that remain after a fork.

    A library that handles forks, such as OpenBLAS, ends its threads before each fork and restarts them on
    demand.
    """
    if _other_threads():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return _other_threads()


def _other_threads() -> int:
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def _initialised_devices() -> list[str]:
    """Return PyTorch's device modules with an initialised accelerator, which would not survive a fork."""
    torch = sys.modules.get("torch")
    found = []
    for name, module in vars(torch).items() if torch else ():
        names = vars(module) if isinstance(module, types.ModuleType) else {}
        if name == "cpu":
            continue  # always initialised, and safe to fork
        # Only the module of a device type has both functions.
        if "device_count" in names and "is_initialized" in names and names["is_initialized"]():
            found.append(f"torch.{name}")
    return found


def _open_devices() -> list[str]:
    """Return the open device files: a driver may fail in a fork even after a mere device query."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            status = os.fstat(int(entry))
            harmless = os.isatty(int(entry)) or os.major(status.st_rdev) in HARMLESS_MAJORS
            if stat.S_ISCHR(status.st_mode) and not harmless:
                found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return sorted(set(found))


def _file_of(name: str) -> str:
    """Return the file of a loaded module; empty if the module is not loaded or has no file."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return getattr(spec, "origin", None) or ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings without changing their filters, to which imported modules may add."""

    def ignore(*_args: object, **_settings: object) -> None:
        """Replace ``warnings.showwarning``."""

    shown, warnings.showwarning = warnings.showwarning, ignore
    try:
        yield
    finally:
        if warnings.showwarning is ignore:
            warnings.showwarning = shown


@contextlib.contextmanager
def _rarely_collecting() -> Iterator[None]:
    """Collect garbage rarely: imports make hundreds of thousands of objects, and nearly all stay."""
    before = gc.get_threshold()
    rarely = (100_000, *before[1:])
    gc.set_threshold(*rarely)
    try:
        yield
    finally:
        if gc.get_threshold() == rarely:  # no imported module has set another one
            gc.set_threshold(*before)


class _WatchedEnviron(dict[bytes, bytes]):
    """The mapping behind ``os.environ``, which records lookups of per-worker variables."""

    def __init__(self, variables: Mapping[bytes, bytes]) -> None:
        super().__init__(variables)
        self.reads: set[str] = set()

    def __getitem__(self, key: bytes) -> bytes:
        name = os.fsdecode(key)
        if name in PER_WORKER:
            self.reads.add(name)
        return super().__getitem__(key)


@contextlib.contextmanager
def _watched() -> Iterator[set[str]]:
    """Record the per-worker variables that are read; the yielded set grows meanwhile."""
    environ: Any = os.environ  # noqa: TID251
    watched = _WatchedEnviron(environ._data)  # noqa: SLF001
    environ._data = watched  # noqa: SLF001 - os.environ itself has many aliases and copies
    try:
        yield watched.reads
    finally:
        environ._data = dict(watched)  # noqa: SLF001
