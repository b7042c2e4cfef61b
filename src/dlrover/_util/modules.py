"""Python modules, found without importing them."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec, PathFinder


def find_top_level(name: str, directory: str) -> ModuleSpec | None:
    """Return what ``import name`` finds in a program whose ``sys.path`` begins with ``directory``; None if nothing.

    ``name`` has no dots. Import hooks are asked, too: packages that are installed for editing may have one.
    """
    beside = PathFinder.find_spec(name, [directory])
    if beside is not None:
        return beside
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # __main__ and the like: imported, but by no import
        return None
