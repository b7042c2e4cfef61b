"""Callbacks that run right after a module's import and leave no trace in the module."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

Then = Callable[[types.ModuleType], None]


def after_import(name: str, then: Then) -> None:
    """Call ``then(module)`` once, after the module ``name`` has been executed, or now if it is loaded."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        then(loaded)
    else:
        _finder.wait_for(name, then)


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that runs the callbacks for imported modules; in ``sys.meta_path`` only while any wait."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Then]] = {}

    def wait_for(self, name: str, then: Then) -> None:
        """Call ``then(module)`` once, after the module's import."""
        if not self._waiting:
            sys.meta_path.insert(0, self)
        self._waiting.setdefault(name, []).append(then)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Find an awaited module as usual, and wrap its loader."""
        if fullname not in self._waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._imported)
        return spec

    def _imported(self, module: types.ModuleType) -> None:
        calls = self._waiting.pop(module.__name__, [])
        if not self._waiting:
            with contextlib.suppress(ValueError):  # the program may have removed it
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
