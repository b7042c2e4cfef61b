"""The files that a rank does not write while it replays its program: moving, copying or deleting them has no effect either.

A program writes a checkpoint beside the old one and renames it to that, or copies it, or deletes it after later ones. With the
file that an earlier process has left, this would replace a whole checkpoint by an older or a torn one.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any


class Unwritten:
    """The paths of files that were not written."""

    def __init__(self, replays: Callable[[], bool]) -> None:
        """``replays`` returns whether this rank is on its way."""
        self._replays = replays
        self._paths: set[str] = set()

    def add(self, file: Any) -> None:
        """Note that a file, given by its path or open, was not written."""
        path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        if isinstance(path, str | os.PathLike):
            self._paths.add(os.path.abspath(os.fsdecode(path)))

    def holds(self, path: Any) -> bool:
        """Return whether this is such a file, or a directory with one."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        whole = os.path.abspath(os.fsdecode(path))
        return any(one == whole or one.startswith(whole + os.sep) for one in self._paths)

    def install(self) -> None:
        """Watch what the program does with files."""
        for name in ("rename", "replace"):
            setattr(os, name, self._watched(getattr(os, name), moves=True))
        for name in ("remove", "unlink"):
            setattr(os, name, self._watched(getattr(os, name)))
        for name in ("copyfile", "copymode", "copystat"):  # the other copies call these
            setattr(shutil, name, self._watched(getattr(shutil, name), moves=name == "copyfile"))
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 has the functions there
        for name in ("rename", "replace", "unlink") if accessor is not None else ():
            setattr(accessor, name, staticmethod(getattr(os, name)))

    def _watched(self, function: Callable[..., Any], *, moves: bool = False) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            path = args[0] if args else kwargs.get("src", kwargs.get("path"))
            elsewhere = kwargs.get("dir_fd") is not None  # as shutil.rmtree names files
            if elsewhere or not (self._replays() and self.holds(path)):
                return function(*args, **kwargs)
            if moves:
                self.add(args[1] if len(args) > 1 else kwargs.get("dst"))
            return None

        return wrapped
