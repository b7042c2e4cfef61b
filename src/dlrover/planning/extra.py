"""Check for the packages of an extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from dlrover.errors import ConfigurationError

PACKAGES = ("numpy", "scipy")
"""Packages of the extra ``planning``, which models need."""


def require(what: str, packages: Sequence[str] = (), extra: str = "planning") -> None:
    """Check that the packages of an extra are installed.

    Args:
        what: The feature that needs the packages, for the error.
        packages: Names of modules; by default `PACKAGES`.
        extra: The extra that has them.

    Raises:
        ConfigurationError: a package is missing.
    """
    missing = [name for name in packages or PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{what} needs {' and '.join(missing)}: pip install 'dlrover[{extra}]'."
        )
