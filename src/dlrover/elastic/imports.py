"""Calls something right after a module has been imported, without a trace in it."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

Then = Callable[[types.ModuleType], None]


def after_import(name: str, then: Then) -> None:
    """Call ``then(module)`` once, when the module called ``name`` has been executed; now if it has been."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        then(loaded)
    else:
        _finder.wait_for(name, then)


class _Finder(importlib.abc.MetaPathFinder):
    """Calls what waits for a module right after that has been executed. It is there while anything waits."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Then]] = {}

    def wait_for(self, name: str, then: Then) -> None:
        """Call ``then(module)`` once."""
        if not self._waiting:
            sys.meta_path.insert(0, self)
        self._waiting.setdefault(name, []).append(then)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Find an awaited module as usual, with its loader wrapped."""
        if fullname not in self._waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._imported)
        return spec

    def _imported(self, module: types.ModuleType) -> None:
        calls = self._waiting.pop(module.__name__, [])
        if not self._waiting:
            with contextlib.suppress(ValueError):  # the program may have taken it out
                sys.meta_path.remove(self)
        for then in calls:
            then(module)


_finder = _Finder()


class _CallingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, then: Then) -> None:
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
