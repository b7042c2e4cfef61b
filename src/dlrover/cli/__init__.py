"""Entry points of the programs ``dlrover-run`` and ``dlrover``."""

from __future__ import annotations

from dlrover._util import start

start.standard_library_first()

import signal  # noqa: E402 - a user's directory may have what it imports, such as a types.py


def launcher() -> int:
    """Run ``dlrover-run``; on Ctrl-C during imports, exit without a traceback."""
    start.take_signals()
    try:
        from dlrover.cli.run.run import main  # noqa: PLC0415

        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def command() -> int:
    """Run ``dlrover``; on Ctrl-C during imports, exit without a traceback."""
    start.take_signals()
    try:
        from dlrover.cli.main import main  # noqa: PLC0415

        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
