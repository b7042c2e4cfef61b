"""Start of a process of DLRover's own: ``python start.py -m MODULE ARGUMENT...`` runs a module of this package.

Unlike ``python -m``, it finds DLRover where the parent has it, and the standard library before all else. Files of a
user's directories, the working directory and those in ``PYTHONPATH``, may have the names of their modules. The same
holds for an installed package such as ``pathlib``.

When this file runs, nothing else of the package can be imported yet.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Directory of the package's directory."""
MASTER, AGENT, SAVER = "dlrover.master", "dlrover.agent", "dlrover.checkpoint.saver.saver"
"""Modules of a job's processes. Workers start the checkpoint saver, which outlives them and holds their generations."""


def command(module: str) -> list[str]:
    """Return the start of the command that runs ``module``."""
    return [sys.executable, os.path.abspath(__file__), "-m", module]


def standard_library_first() -> None:
    """Put the standard library in front of the search path."""
    library = os.path.dirname(os.__file__)
    standard = (library, os.path.join(library, "lib-dynload"))
    sys.path.sort(key=lambda entry: entry not in standard)


def take_signals() -> None:
    """Take the signals that this process's parent has blocked, which would never arrive, and SIGCHLD if it is ignored.

    While it is ignored, every child seems to end with exit code 0.
    """
    import signal  # noqa: PLC0415 - after `standard_library_first`

    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def load_package() -> None:
    """Load the package from its own directory, which need not be in the search path."""
    from importlib.machinery import PathFinder  # noqa: PLC0415 - after `standard_library_first`
    from importlib.util import module_from_spec  # noqa: PLC0415

    spec = PathFinder.find_spec("dlrover", [ROOT])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["dlrover"] = package = module_from_spec(spec)
    spec.loader.exec_module(package)


def _main() -> None:
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        del sys.path[0]  # the directory of this file
    standard_library_first()
    take_signals()
    load_package()
    if ROOT not in sys.path:  # what DLRover needs may be there, too
        sys.path.append(ROOT)
    import runpy  # noqa: PLC0415

    del sys.argv[:2]
    runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]  # noqa: SLF001 - as ``python -m`` does


if __name__ == "__main__":
    _main()
