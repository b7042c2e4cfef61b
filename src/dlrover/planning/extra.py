"""Check for the packages of the extra ``planning``, which models need."""

from __future__ import annotations

import importlib.util

from dlrover.errors import ConfigurationError

PACKAGES = ("numpy", "scipy")


def require(what: str) -> None:
    """Check that models can be fitted.

    Args:
        what: The feature that needs the packages, for the error.

    Raises:
        ConfigurationError: a package is missing.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{what} needs {' and '.join(missing)}: pip install 'dlrover[planning]'."
        )
