"""Doors: packages whose public names are loaded on first use, because most of them need heavy modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from dlrover import __version__


def install(extra: str) -> str:
    """Return the command that installs an extra, and no older release, which may be the original's."""
    return f"pip install 'dlrover[{extra}]>={__version__}'"


def lazy(package: str, homes: Mapping[str, str], *, extra: str = "") -> Callable[[str], Any]:
    """Return a package's ``__getattr__``: each public name is imported from its home module on first use.

    If an import finds no module outside of DLRover, the ModuleNotFoundError says to install ``extra``.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(homes[name])
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not extra or not missing or missing.partition(".")[0] == "dlrover":
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs the package {missing}: {install(extra)}.",
                name=missing,
            ) from error
        return getattr(home, name)

    return load
