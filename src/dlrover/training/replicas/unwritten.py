"""The files that a rank does not write while it replays its program: what it would write there comes from no training.

A program writes a checkpoint to its place, or beside the old one and renames it, and deletes older ones. While it replays the program, a rank
has the weights of its beginning, and the files there are those of later steps, also of the ranks that train meanwhile. So what
it writes goes to files without a name, and what it would move, copy, link or delete stays. Exempt are caches, and what it
makes for itself in the replay: temporary files and folders.
"""

from __future__ import annotations

import builtins
import functools
import io
import logging
import os
import pathlib
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from dlrover import config

logger = logging.getLogger(__name__)

_CACHES = (
    "TORCH_HOME", "HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR",
)  # fmt: skip
_SYSTEM = "/dev/", "/proc/", "/sys/"
_WRITERS = ("dlrover.", "torch._dynamo.", "torch._inductor.", "triton.", "numba.")
"""Modules whose files no step of the training has changed: compiled code, and what this package writes."""
_STANDARD = frozenset({"bz2", "codecs", "contextlib", "gzip", "lzma", "os", "pathlib", "shutil", "tarfile", "tempfile", "zipfile"})  # fmt: skip
"""Modules that handle files for their callers."""
_ALONE = os.O_CREAT | os.O_EXCL
_ALIASES = ("bz2", "_builtin_open"), ("lzma", "_builtin_open"), ("tarfile", "bltn_open")
"""Names under which modules may have ``open`` by the time that it is replaced."""


def is_cached(path: Any) -> bool:
    """Return whether a file is in a cache, which a new machine fills when the program starts."""
    environ = config.environ()
    homes = [*(environ.get(name, "") for name in _CACHES), os.path.expanduser("~/.cache")]
    homes = [os.path.realpath(home) for home in homes if home]
    return any(os.path.realpath(path).startswith(home + os.sep) for home in homes)


class Unwritten:
    """The files that a replaying rank leaves as they are."""

    def __init__(self, replays: Callable[[], bool]) -> None:
        """``replays`` returns whether this rank replays the program."""
        self._replays = replays
        self._own: set[str] = set()
        """Temporary files and folders that this rank has made in the replay."""
        self._made: set[str] = set()
        """Folders that it has made there for the program's files."""
        self._deleted: set[str] = set()
        """What the program has deleted there, and is still there."""
        self._open: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """Paths of the files without a name that the program writes to."""

    def install(self) -> None:
        """Watch what the program does with files."""
        real = builtins.open
        builtins.open = io.open = self._opening(real)
        for module, alias in _ALIASES:
            if getattr(sys.modules.get(module), alias, None) is real:
                setattr(sys.modules[module], alias, builtins.open)
        os.open, os.mkdir = self._claiming(os.open), self._making(os.mkdir)
        tempfile.mkdtemp = self._claiming(tempfile.mkdtemp)
        for name in ("rename", "replace", "link", "symlink"):
            setattr(os, name, self._moving(getattr(os, name)))
        for name in ("copyfile", "copymode", "copystat"):  # the other copies call these
            setattr(shutil, name, self._moving(getattr(shutil, name)))
        for place, name in ((os, "remove"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
            setattr(place, name, self._removing(getattr(place, name)))
        touch = self._removing(pathlib.Path.touch)
        pathlib.Path.touch = touch  # type: ignore[method-assign]
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 has the functions there
        for name in ("open", "rename", "replace", "link", "symlink", "unlink", "rmdir", "mkdir"):
            if hasattr(accessor, name):
                setattr(accessor, name, staticmethod(getattr(io if name == "open" else os, name)))

    def end(self) -> None:
        """Let files that the program still writes to have their names from now on: it goes on at the end of what is there."""
        for file, path in list(self._open.items()):
            if not file.closed:
                try:
                    _place(file, path)
                except OSError as error:
                    logger.warning("%s cannot be written: %s", path, error)
        self._open.clear()

    # ---- which files

    def _keeps(self, path: Any) -> str:
        """Return the whole path of a file that this rank leaves as it is while it replays; empty for another one."""
        if not self._replays() or not isinstance(path, str | bytes | os.PathLike):
            return ""
        whole = os.path.abspath(os.fsdecode(path))
        own = any(whole == one or whole.startswith(one + os.sep) for one in self._own)
        exempt = (
            own or whole.startswith(_SYSTEM) or is_cached(whole) or _writer().startswith(_WRITERS)
        )
        return "" if exempt else whole

    # ---- what is watched

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            writes = isinstance(mode, str) and any(letter in mode for letter in "wxa")
            whole = (
                self._keeps(file) if writes and len(args) < 6 and not kwargs.get("opener") else ""
            )
            if not whole or not _is_file(whole):
                return function(file, mode, *args, **kwargs)
            if _writer().endswith(
                ".memmap."
            ):  # the array outlives the replay; others may have it, too
                present = mode.replace("w", "r") if os.path.exists(whole) else mode
                return function(file, present, *args, **kwargs)
            found = function(file, mode, *args, **{**kwargs, "opener": _nameless})
            self._open[found] = whole
            return found

        return opened

    def _claiming(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes temporary files, folders and locks, which it makes where nothing is."""

        @functools.wraps(function)
        def made(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            new = not isinstance(found, int) or (len(args) > 1 and args[1] & _ALONE == _ALONE)
            whole = self._keeps(args[0] if isinstance(found, int) else found) if new else ""
            if whole and kwargs.get("dir_fd") is None:
                self._own.add(whole)
            return found

        return made

    def _making(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def made(path: Any, *args: Any, **kwargs: Any) -> None:
            whole = self._keeps(path) if kwargs.get("dir_fd") is None else ""
            if whole in self._deleted and os.path.isdir(whole):
                self._deleted.discard(whole)
                return
            function(path, *args, **kwargs)
            if whole:
                self._made.add(whole)

        return made

    def _moving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        takes = function.__name__ in ("rename", "replace")

        @functools.wraps(function)
        def moved(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            elsewhere = kwargs.get("src_dir_fd") is not None or kwargs.get("dst_dir_fd") is not None
            if elsewhere or not (self._keeps(dst) or (takes and self._keeps(src))):
                return function(src, dst, *args, **kwargs)
            if takes and not self._keeps(src):
                self._discard(os.path.abspath(os.fsdecode(src)))
            return dst

        return moved

    def _discard(self, own: str) -> None:
        """Delete what this rank has made for itself, which the program moves to another place."""
        if os.path.isdir(own) and not os.path.islink(own):
            shutil.rmtree(own)
        elif os.path.lexists(own):
            os.unlink(own)

    def _removing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def removed(path: Any, *args: Any, **kwargs: Any) -> Any:
            whole = self._keeps(path) if kwargs.get("dir_fd") is None else ""
            if not whole or whole in self._made:
                return function(path, *args, **kwargs)
            self._deleted.add(whole)
            return None

        return removed


def _writer() -> str:
    """Return the module that handles a file, which may call the standard library for it."""
    frame = sys._getframe(1)  # noqa: SLF001 - the way to a caller's module
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__"))
        if name != __name__ and name.partition(".")[0] not in _STANDARD:
            return f"{name}."
        frame = frame.f_back
    return ""


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def _nameless(_path: str, _flags: int) -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _place(file: Any, path: str) -> None:
    """Give an open file without a name a path; what is in it goes there only if nothing else is."""
    file.flush()
    access = os.O_RDWR if file.readable() else os.O_WRONLY
    number = os.open(path, access | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    with open(number, "ab") as target:
        if not os.fstat(number).st_size:
            target.writelines(_parts(file.fileno()))
            target.flush()
        os.dup2(number, file.fileno(), inheritable=False)


def _parts(number: int) -> Iterator[bytes]:
    at = 0
    while part := os.pread(number, 1 << 20, at):
        yield part
        at += len(part)
