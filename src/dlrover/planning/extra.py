"""Whether the packages are there that models need: they are an extra."""

from __future__ import annotations

import importlib.util

from dlrover.errors import ConfigurationError

PACKAGES = ("numpy", "scipy")


def require(what: str) -> None:
    """See that models can be fitted.

    Args:
        what: What needs them, for the error.

    Raises:
        ConfigurationError: a package is missing.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{what} needs {' and '.join(missing)}: pip install 'dlrover[planning]'."
        )
