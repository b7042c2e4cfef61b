"""Entry points of the programs ``dlrover-run`` and ``dlrover``."""

from __future__ import annotations

from dlrover._util import start

start.standard_library_first()

import os  # noqa: E402
import signal  # noqa: E402 - a user's directory may have what it imports, such as a types.py
import sys  # noqa: E402


def launcher() -> int:
    """Run ``dlrover-run``; on Ctrl-C during imports, exit without a traceback."""
    start.take_signals()
    try:
        from dlrover.cli.run.run import main  # noqa: PLC0415

        return _left(main())
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def command() -> int:
    """Run ``dlrover``; on Ctrl-C during imports, exit without a traceback."""
    start.take_signals()
    try:
        from dlrover.cli.main import main  # noqa: PLC0415

        return _left(main())
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _left(code: int) -> int:
    """Return the exit code; under PYTHONINSPECT leave with it here, because the interpreter would leave with 1."""
    if sys.flags.inspect and not sys.flags.interactive:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code
