"""Imports ahead what a worker is going to import, for a zygote.

A fork must be as good as a process that imports the same by itself. What importing did to the process
stays: variables it set, warning filters, exit handlers. What does not survive a fork, or would have come
out differently in a worker, is a problem: a zygote with a problem forks no workers.

Besides our own, only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
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

from dlrover.agent.generators import Generators

PER_WORKER = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
     "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
     "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
)  # fmt: skip
"""Variables that a worker has and its zygote has not."""


HARMLESS_MAJORS = (1, 5)
"""The kernel's numbers for /dev/null, /dev/urandom and their like, and for /dev/tty and /dev/ptmx."""


@dataclass(frozen=True)
class Preloaded:
    """What importing led to."""

    problem: str = ""
    """Why forks would not be as good as new processes; empty if they are."""
    variables: dict[str, str | None] = field(default_factory=dict)
    """Environment variables that were set, or removed (None)."""
    generators: Generators = field(default_factory=Generators)
    """Random generators that were made."""


def preload(names: list[str], own: Mapping[str, str]) -> Preloaded:
    """Import modules by name.

    A module that cannot be imported is left to the worker, which will report it if it matters.

    Args:
        names: installed modules, in the order in which to import them.
        own: name and file of each module that the program took from elsewhere; none of them may get
            loaded from another place.
    """
    before = dict(os.environ)  # noqa: TID251 - to see what importing changes
    generators = Generators()
    with _quiet(), generators.watched(), _watched() as asked:
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    after = dict(os.environ)  # noqa: TID251
    changed = {
        k: after.get(k) for k in before.keys() | after.keys() if before.get(k) != after.get(k)
    }
    generators.find()
    return Preloaded("; ".join(_problems(asked, own)), changed, generators)


def _problems(asked: set[str], own: Mapping[str, str]) -> Iterator[str]:
    if threading.active_count() > 1:
        others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        yield f"importing started threads: {', '.join(others)}"
    if native := _native_threads():
        yield f"importing started {native} native thread{'' if native == 1 else 's'}"
    if initialised := _initialised_devices():
        yield f"importing initialised {', '.join(initialised)}"
    if opened := _open_devices():
        yield f"importing opened {', '.join(opened)}"
    if asked:
        yield f"importing read {', '.join(sorted(asked))}, which only workers have"
    if taken := [name for name, file in own.items() if _file_of(name) not in ("", file)]:
        yield f"importing loaded other modules than the program's: {', '.join(taken)}"


def _native_threads() -> int:
    """Threads that Python does not know of, and that are still here after a fork.

    A library that handles forks, as OpenBLAS does, ends its threads before each one and starts them again when it
    needs them.
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
    """PyTorch's device modules that hold an accelerator: it would not survive a fork."""
    torch = sys.modules.get("torch")
    found = []
    for name, module in vars(torch).items() if torch else ():
        names = vars(module) if isinstance(module, types.ModuleType) else {}
        if name == "cpu":
            continue  # always initialised, and nothing that a fork could break
        # A module of a kind of device has both functions.
        if "device_count" in names and "is_initialized" in names and names["is_initialized"]():
            found.append(f"torch.{name}")
    return found


def _open_devices() -> list[str]:
    """Devices that are open here: a driver that was merely asked for its devices may not work in a fork."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that lists them is closed by now
            status = os.fstat(int(entry))
            harmless = os.isatty(int(entry)) or os.major(status.st_rdev) in HARMLESS_MAJORS
            if stat.S_ISCHR(status.st_mode) and not harmless:
                found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return sorted(set(found))


def _file_of(name: str) -> str:
    """The file of a loaded module; empty if it is not loaded or has none."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return getattr(spec, "origin", None) or ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show no warnings, without a change to their filters: modules add to these when imported."""

    def ignore(*_args: object, **_settings: object) -> None:
        """Take the place of ``warnings.showwarning``."""

    shown, warnings.showwarning = warnings.showwarning, ignore
    try:
        yield
    finally:
        if warnings.showwarning is ignore:
            warnings.showwarning = shown


class _Watched(dict[bytes, bytes]):
    """The variables behind ``os.environ``; notes which of a worker's variables are looked up."""

    def __init__(self, variables: Mapping[bytes, bytes]) -> None:
        super().__init__(variables)
        self.asked: set[str] = set()

    def __getitem__(self, key: bytes) -> bytes:
        name = os.fsdecode(key)
        if name in PER_WORKER:
            self.asked.add(name)
        return super().__getitem__(key)


@contextlib.contextmanager
def _watched() -> Iterator[set[str]]:
    """Note which of a worker's variables are read; the set fills meanwhile."""
    environ: Any = os.environ  # noqa: TID251
    watched = _Watched(environ._data)  # noqa: SLF001
    environ._data = watched  # noqa: SLF001 - it is read through many names, and copied
    try:
        yield watched.asked
    finally:
        environ._data = dict(watched)  # noqa: SLF001
