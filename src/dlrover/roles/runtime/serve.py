"""``python -m dlrover.roles.runtime.serve TARGET``: the process of a role that is an object or a function.

TARGET is ``module:Class``: its public methods, or those with `dlrover.roles.rpc`, are called by other roles; or
``module.function``, which is called without arguments.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Sequence
from typing import Any

from dlrover.errors import ConfigurationError
from dlrover.roles.runtime import worker


def main(argv: Sequence[str] | None = None) -> None:
    """Serve an object until the process is ended, or run a function."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) != 1:
        raise ConfigurationError(
            f"python -m dlrover.roles.runtime.serve takes module:Class or module.function, not {words}."
        )
    if ":" not in words[0]:
        module, _, name = words[0].rpartition(".")
        _found(module, name)()
        return
    joined = worker.start(ready=False)
    joined.serve(_made(_found(*words[0].split(":", 1)), joined.config))
    threading.Event().wait()


def _found(module: str, name: str) -> Any:
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ConfigurationError(f"The module {module} has no {name} that can be called.")
    return found


def _made(kind: Any, settings: Any) -> object:
    """Return the object: made of the role's configuration if it takes an argument."""
    try:
        takes = [
            one
            for one in inspect.signature(kind).parameters.values()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
    except ValueError:  # a class without a signature
        takes = []
    return kind(settings) if takes else kind()


if __name__ == "__main__":
    main()
