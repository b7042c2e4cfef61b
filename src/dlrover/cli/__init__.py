"""The commands ``dlrover-run`` and ``dlrover``."""

from __future__ import annotations

import signal


def launcher() -> int:
    """What the program ``dlrover-run`` calls. Ctrl-C while modules are loaded ends it without a traceback."""
    try:
        from dlrover.cli.run import main  # noqa: PLC0415

        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def command() -> int:
    """What the program ``dlrover`` calls, in the same way."""
    try:
        from dlrover.cli.main import main  # noqa: PLC0415

        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
