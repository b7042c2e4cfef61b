"""Packages of the extras: optional dependencies, as in ``pip install 'dlrover[kubernetes]'``."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from dlrover._util.doors import install
from dlrover.errors import ConfigurationError

PLANNING = ("numpy", "scipy")
"""Packages of the extra ``planning``, which models need."""


@contextlib.contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Wrap imports of packages that an extra brings.

    Args:
        what: The feature that needs the packages, for the error.
        extra: The extra, or several of them with commas.

    Raises:
        ConfigurationError: a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "dlrover"):
            raise
        raise ConfigurationError(_missing(what, package, extra)) from error


def load(module: str, what: str, extra: str) -> Any:
    """Return a module that needs an extra, or is in a package of one; the arguments are as for `needed`.

    Raises:
        ConfigurationError: a package is missing.
    """
    with needed(what, extra):
        return importlib.import_module(module)


def require(what: str, extra: str, packages: tuple[str, ...]) -> None:
    """Check that packages are installed, without importing them.

    Args:
        what: The feature that needs the packages, for the error.
        extra: The extra that brings them.
        packages: Names of modules.

    Raises:
        ConfigurationError: a package is missing.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(_missing(what, package, extra))


def _missing(what: str, package: str, extra: str) -> str:
    return f"{what} needs the package {package}: {install(extra)}."
