"""Modules of the original that are not here: importing one says what to write instead."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from dlrover.original.names import MODULES, PROGRAMS
from dlrover.spec.words import did_you_mean

PAGE = "docs/from-dlrover.md"


class Absent(MetaPathFinder):
    """Last finder of a package of the original: whatever reaches it is not here.

    Args:
        package: The package, such as ``tfplus``.
        instead: What to write instead of a module of it and those below, by its name.
    """

    def __init__(self, package: str, instead: Mapping[str, str]) -> None:
        self._package = package
        self._instead = instead

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse a module of the package.

        Raises:
            ModuleNotFoundError: the module is of this package.
        """
        del path, target
        if not fullname.startswith(f"{self._package}."):
            return None
        raise ModuleNotFoundError(
            f"No module named {fullname!r}{self._hint(fullname)}", name=fullname
        )

    def _hint(self, fullname: str) -> str:
        for module, words in self._instead.items():
            if f"{fullname}.".startswith(f"{module}."):
                return f": use {words}."
        parent, _, name = fullname.rpartition(".")
        beside = [each.name.rpartition(".") for each in (*MODULES, *PROGRAMS)]
        known = [other for folder, _, other in beside if folder == parent]
        near = did_you_mean(name, known, before=f"{parent}.")
        return f": it is not among the original's names that this package has ({PAGE}).{near}"


def refuse(package: str, instead: Mapping[str, str] | None = None) -> None:
    """Have imports of modules that ``package`` lacks say what to write instead."""
    sys.meta_path.append(Absent(package, instead or {}))
